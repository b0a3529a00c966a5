"""Train transformers' `BertModel` on the patches of CIFAR-10 for a given time, with the stock Trainer.

    python benchmarks/bert_tutorial.py --data uoft-cs/cifar10 --minutes 14 --output_dir runs/bert_tutorial

This is the baseline. It is the set-up of a widely read tutorial:

- Model: hidden size 256, 12 layers, 8 heads. A Conv2d makes 4x4 patches, which enter through `inputs_embeds`. The
  class token is drawn from N(0, 1 / hidden size). The readout is Linear, GELU, Linear.
- Augmentation: flips, and crops after padding by 4.
- Training: AdamW with a constant rate of 5e-4, batches of 192, float32. The rest is the default of the stock Trainer
  (no weight decay, gradients clipped at 1).

`cifar10_bert_tutorial.yaml` is nearly the same set-up in this package. The splits are those of the recipe. The log is
written to `log.json`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torchvision.transforms import v2
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit_scratch.conversion.bert import BertComposite
from hf_vit_scratch.data.splits import load_splits

HIDDEN_SIZE, IMAGE_SIZE, PATCH_SIZE = 256, 32, 4


class BertClassifier(nn.Module):
    """`BertModel` on patches, with the readout of the tutorial."""

    def __init__(self, num_labels: int):
        super().__init__()
        config = BertConfig(
            hidden_size=HIDDEN_SIZE, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8
        )
        self.encoder = BertComposite(
            BertModel(config, add_pooling_layer=False),
            nn.Conv2d(3, HIDDEN_SIZE, PATCH_SIZE, PATCH_SIZE),
            torch.randn(HIDDEN_SIZE) * HIDDEN_SIZE**-0.5,
        )
        self.readout = nn.Sequential(
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE), nn.GELU(), nn.Linear(HIDDEN_SIZE, num_labels)
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ImageClassifierOutput:
        """Return the loss and logits (B, L) of images (B, 3, 32, 32) and labels (B,), from the class token."""
        logits = self.readout(self.encoder(pixel_values).last_hidden_state[:, 0])
        return ImageClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


class Clock(TrainerCallback):
    """Stop when the time is over, and add the minutes to the log."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop training when the time is over."""
        control.should_training_stop = time.perf_counter() - self.start > self.seconds

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the minutes to the last log entry."""
        state.log_history[-1]["minutes"] = round((time.perf_counter() - self.start) / 60, 2)


def prepared(rows: Dataset, random: bool) -> Dataset:
    """Return rows that decode, normalise and (if `random`) augment their image when they are read."""
    transform = v2.Compose(
        [
            *([v2.RandomHorizontalFlip(), v2.RandomCrop(IMAGE_SIZE, padding=4)] if random else []),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    return rows.with_transform(
        lambda batch: {
            "pixel_values": [transform(image.convert("RGB")) for image in batch["image"]],
            "labels": batch["label"],
        }
    )


def main() -> None:
    """Train until the time is over with regular evaluations, then test once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--eval_steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()

    set_seed(args.seed)
    splits = load_splits(args.data, near_duplicates="ignore")
    trainer = Trainer(
        model=BertClassifier(splits["train"].features["label"].num_classes),
        args=TrainingArguments(
            args.output_dir,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=192,
            per_device_eval_batch_size=500,
            num_train_epochs=10,
            remove_unused_columns=False,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=args.eval_steps,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=prepared(splits["train"], random=True),
        eval_dataset=prepared(splits["validation"], random=False),
        compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())},
        callbacks=[Clock(60 * args.minutes)],
    )
    trainer.train()
    output_dir = Path(args.output_dir)
    (output_dir / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1) + "\n", encoding="utf-8")
    metrics = trainer.predict(prepared(splits["test"], random=False)).metrics
    print(metrics)
    (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
