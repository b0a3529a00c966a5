"""What a classifier learns after training: calibrated scores, and which images it does not know."""

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.dataset import ImageClassificationDataset
from ..evaluation.trust import Trust
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from .trainer import ViTTrainer

logger = logging.getLogger(__name__)

MOST_IMAGES = 4000  # training images whose vectors are computed


def can_be_calibrated(trainer: ViTTrainer) -> bool:
    """Return whether a run should be calibrated: it asks for that, and its whole model learnt one class per image."""
    dataset, model = trainer.train_dataset, trainer.model
    if not isinstance(dataset, ImageClassificationDataset) or not isinstance(model, ViTScratchForImageClassification):
        return False
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return trainer.args.calibrate and dataset.labels.ndim == 1 and not is_sharded


def calibrate(trainer: ViTTrainer) -> None:
    """Calibrate a classifier of single classes on the validation split, and save it with its `Trust`.

    The weights and biases of its last layer are divided by a temperature. So pipelines and exports have calibrated
    scores, too, and no answer changes.
    """
    model, train, seed = cast(Any, trainer.model), cast(Any, trainer.train_dataset), trainer.args.seed
    rows = np.random.default_rng(seed).permutation(len(train))[:MOST_IMAGES]
    sample = ImageClassificationDataset(train.rows.select(np.sort(rows)), train.image_processor)
    vectors, _, classes = _outputs(trainer, sample)
    trust = Trust.fit(vectors, classes, _outputs(trainer, trainer.eval_dataset), trainer.args.target_accuracy)
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.div_(trust.temperature)
    model.config.temperature = trust.temperature
    logger.info(
        "Calibrated on %d validation images: calibration error %.3f, before %.3f.",
        len(cast(Any, trainer.eval_dataset)),
        trust.calibration_error,
        trust.error_before,
    )
    if trust.target_accuracy is not None:
        logger.info(
            "For an accuracy of %.1f%%, `vit-scratch predict` calls %.1f%% of the validation images unknown.",
            100 * trust.target_accuracy,
            100 * (1 - trust.coverage),
        )
    trainer.save_model(_internal_call=True)
    if trainer.args.should_save:
        trust.save(Path(str(trainer.args.output_dir)))


def _outputs(trainer: ViTTrainer, dataset: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the pooled vectors, the logits and the labels of all images of a dataset."""
    vectors: list[torch.Tensor] = []
    hook = cast(Any, trainer.model).base_model.register_forward_hook(
        lambda module, args, output: vectors.append(output.pooler_output)
    )
    summaries = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
    trainer.compute_metrics = None
    trainer.preprocess_logits_for_metrics = cast(Any, lambda logits, labels: (vectors.pop().float(), logits.float()))
    try:
        outputs = trainer.predict(dataset)
    finally:
        hook.remove()
        trainer.compute_metrics, trainer.preprocess_logits_for_metrics = summaries
    return (*outputs.predictions, np.asarray(outputs.label_ids))
