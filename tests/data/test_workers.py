"""Training ends with the same bits, however many workers load the images, and wherever decoded images are kept."""

import io
import os
import sys

import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from helpers import TINY
from transformers import ViTImageProcessor

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.data import dataset as data
from hf_vit_scratch.data.augmentation import training_stages
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.trainer import ViTTrainer

STEPS = 100 if os.environ.get("RELIABILITY") == "long" else 10
AUGMENTATION = {
    "initial_image_size": (8, 16), "initial_image_size_fraction": 0.3, "augmentation_off_fraction": 0.2,
    "mixing_start_fraction": 0.2, "policy_start_fraction": 0.5,
    "random_resized_crop_scale": 0.4, "crop_padding": 2, "horizontal_flip_prob": 0.5, "rotation_degrees": 15,
    "translate": 0.1, "scale": 0.1, "random_erasing_prob": 0.5,
}  # fmt: skip


def make_rows(kind, photographs):
    """21 images, so that the last batch of an epoch is odd: of one small size, or JPEG files of different sizes."""
    images = []
    for number in range(21):
        image = photographs[number % 2].crop((10 * number, 5 * number, 10 * number + 400, 5 * number + 300))
        if kind == "small":
            images.append(image.resize((20, 12)))
        else:
            file = io.BytesIO()
            image.resize((100 + 7 * number, 90 + 3 * number)).save(file, "JPEG", quality=90)
            images.append({"path": None, "bytes": file.getvalue()})
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list("abcde"))})
    return Dataset.from_dict({"image": images, "label": [number % 5 for number in range(21)]}, features=features)


def trained(rows, policy, folder, workers, start=None, **options):
    """The weights after training, and the number of worker processes that prepared the images."""
    stages, stage = training_stages((16, 24), auto_augment=policy, **AUGMENTATION)
    mixing = Mixup(5, mixup_alpha=0.4, cutmix_alpha=1.0, mixup_prob=0.8, label_smoothing=0.1)
    processor = ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)
    args = ViTTrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=8, learning_rate=1e-3, save_strategy="no",
        eval_strategy="steps", eval_steps=STEPS // 2, load_best_model_at_end=False, disable_tqdm=True, use_cpu=True,
        dataloader_num_workers=workers, metric_for_best_model=None, dataloader_multiprocessing_context=start,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = ViTTrainer(
        model=ViTScratchForImageClassification(ViTScratchConfig(**TINY)),
        args=args,
        train_dataset=ImageClassificationDataset(rows, BatchTransform(processor, stages, mixing, seed=3), **options),
        eval_dataset=ImageClassificationDataset(rows, BatchTransform(processor)),
        stage=stage,
    )
    trainer.train()
    losses = [logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs]
    return trainer.model.state_dict(), losses, trainer.get_train_dataloader().num_workers


@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    [
        ("small", "randaugment", {}),  # the same as in memory
        ("photographs", "trivialaugment", {"cache_images": True}),
        ("photographs", "trivialaugment", {}),
    ],
)
def test_weights_do_not_depend_on_workers(kind, policy, options, photographs, tmp_path, monkeypatch):
    rows = make_rows(kind, photographs)
    in_memory = trained(rows, policy, tmp_path, workers=2)
    assert in_memory[2] == 0  # there is nothing to do for them

    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    results = [trained(rows, policy, tmp_path, number, **options) for number in (0, 1, 2)]
    assert [workers for _, _, workers in results] == [0, 1, 2]
    if kind == "small" or options:
        results.append(in_memory)
    (weights, losses, _), *others = results
    for other_weights, other_losses, _ in others:
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
        assert other_losses == losses


@pytest.mark.slow
def test_workers_that_are_started_afresh_give_the_same_weights(photographs, tmp_path, monkeypatch):
    # As on macOS and Windows, where a worker gets a pickled copy of the dataset.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 2)  # each worker imports torch
    rows = make_rows("photographs", photographs)
    forked, spawned = (trained(rows, "randaugment", tmp_path, 1, start) for start in ("fork", "spawn"))
    assert all(torch.equal(forked[0][name], spawned[0][name]) for name in forked[0])
    assert forked[1] == spawned[1]
