"""What a classifier learns after training: calibrated scores, and which images it does not know."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ..data.dataset import BatchTransform, ImageClassificationDataset
from ..evaluation.trust import Trust
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from .trainer import ViTTrainer

MOST_IMAGES = 4000  # training images whose vectors are computed


def calibrate(trainer: ViTTrainer) -> None:
    """Calibrate a classifier of single classes on the validation split, and save it with its `Trust`.

    The weights and biases of its last layer are divided by a temperature. So pipelines and exports have calibrated
    scores, too, and no answer changes. Other models, and those that are spread over devices, stay as they are.
    """
    model, train, seed = cast(Any, trainer.model), cast(Any, trainer.train_dataset), trainer.args.seed
    has_images = all(isinstance(part, ImageClassificationDataset) for part in (train, trainer.eval_dataset))
    is_classifier = has_images and isinstance(model, ViTScratchForImageClassification)
    is_spread = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not (trainer.args.calibrate and is_classifier) or is_spread or train.labels.ndim > 1:
        return
    rows = np.random.default_rng(seed).permutation(len(train))
    labels = train.labels.numpy()[rows]
    visits = pd.Series(labels).groupby(labels).cumcount()
    rows = rows[np.argsort(visits, kind="stable")][:MOST_IMAGES]  # one of each class, another one of each, and so on
    sample = ImageClassificationDataset(train.rows.select(np.sort(rows)), BatchTransform(train.image_processor))
    vectors, _, classes = _outputs(trainer, sample)
    trust = Trust.fit(vectors, classes, _outputs(trainer, trainer.eval_dataset), trainer.args.target_accuracy)
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.div_(trust.temperature)
    model.config.temperature = (model.config.temperature or 1.0) * trust.temperature
    trainer.save_model(_internal_call=True)
    if trainer.args.should_save:
        trust.save(Path(str(trainer.args.output_dir)))


def _outputs(trainer: ViTTrainer, dataset: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the pooled vectors, the logits and the labels of all images of a dataset."""
    vectors: list[torch.Tensor] = []
    hook = cast(Any, trainer.model).base_model.register_forward_hook(
        lambda module, args, output: vectors.append(output.pooler_output)
    )
    functions = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
    trainer.compute_metrics = None
    trainer.preprocess_logits_for_metrics = cast(Any, lambda logits, labels: (vectors.pop().float(), logits.float()))
    try:
        outputs = trainer.predict(dataset)
    finally:
        hook.remove()
        trainer.compute_metrics, trainer.preprocess_logits_for_metrics = functions
    return (*outputs.predictions, np.asarray(outputs.label_ids))
