"""Measure the cost of the loop around a training step: a bare loop, the stock Trainer and `ViTTrainer`.

    python benchmarks/training_loop.py --sizes 32x32 B/16

All three use the same model, images, optimizer (fused AdamW, gradients clipped at 1) and number of steps. They run one
after the other, in a new order each round. The first steps of each run are not counted. The results are the median
images per second over the rounds, and the ratio to the other loops in the same round with its quartiles.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import SIZES, Size, our_config, quartiles, write_results
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.speed.hardware import keep_freed_memory
from hf_vit_scratch.speed.optimize import example_batch_for, optimize
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.trainer import ViTTrainer

WARM_UP = 3  # first steps, which are not counted


class Pixels(Dataset[dict[str, Tensor]]):
    """Random images that are ready for the model, in batches."""

    def __init__(self, size: Size, number: int):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(number, 3, size.image_size, size.image_size, generator=generator)
        self.labels = torch.randint(size.num_labels, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the images and labels of a batch."""
        return {"pixel_values": self.images[indices], "labels": self.labels[indices]}


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged, as the collator of complete batches."""
    return batch


class Clock(TrainerCallback):
    """Record when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time. On an accelerator, wait for its work at the ends of the measurement."""
        if args.device.type != "cpu" and state.global_step in (WARM_UP, state.max_steps):
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())


def bare(model: nn.Module, data: Pixels, batch: int, steps: int, args: TrainingArguments) -> list[float]:
    """Run a loop as one would write it by hand, and return the times at which the steps ended."""
    model.train().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    loader = DataLoader(data, batch, shuffle=True, collate_fn=as_it_is, pin_memory=args.device.type != "cpu")
    times: list[float] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            yield from loader

    for inputs in batches():
        inputs = {name: tensor.to(args.device, non_blocking=True) for name, tensor in inputs.items()}
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.device.type != "cpu" and len(times) + 1 in (WARM_UP, steps):
            torch.accelerator.synchronize()
        times.append(time.perf_counter())
        if len(times) == steps:
            return times
    raise AssertionError("the loader never ends")


def through(trainer_class: type[Trainer]) -> Callable[..., list[float]]:
    """Return a function that does the same through a Trainer."""

    def run(model: nn.Module, data: Pixels, batch: int, steps: int, args: TrainingArguments) -> list[float]:
        clock = Clock()
        trainer_class(model=model, args=args, train_dataset=data, data_collator=as_it_is, callbacks=[clock]).train()
        return clock.times

    return run


LOOPS: dict[str, tuple[type[TrainingArguments], Callable[..., list[float]]]] = {
    "bare loop": (ViTTrainingArguments, bare),
    "Trainer": (TrainingArguments, through(Trainer)),
    "ViTTrainer": (ViTTrainingArguments, through(ViTTrainer)),
}


def images_per_second(name: str, size: Size, batch: int, steps: int, bf16: bool, use_cpu: bool) -> float:
    """Return the images per second of one run."""
    arguments_class, run = LOOPS[name]
    torch.manual_seed(0)
    model = ViTScratchForImageClassification(our_config(size))
    if use_cpu and name != "ViTTrainer":  # which does it by itself
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            optimize(model, example_batch_for(model, batch), training=True)
    data = Pixels(size, batch * (steps // 2))  # two epochs
    with tempfile.TemporaryDirectory() as folder:
        args = arguments_class(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=bf16,
            use_cpu=use_cpu,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=not use_cpu,
        )
        times = run(model, data, batch, steps, args)
    return batch * (steps - WARM_UP) / (times[-1] - times[WARM_UP - 1])


def main() -> None:
    """Measure all loops, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["32x32", "B/16"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="result file; by default a dated file beside this script")
    args = parser.parse_args()
    use_cpu = not torch.cuda.is_available()
    keep_freed_memory()  # ViTTrainer does it, also for later runs in this process

    lines = ["| work | " + " | ".join(f"{name}, images/s" for name in LOOPS) + " | ViTTrainer / bare | / Trainer |"]
    lines.append("| --- " * (len(LOOPS) + 3) + "|")
    shuffle = random.Random(0).shuffle
    for precision in args.precision:
        for name in args.sizes:
            size = SIZES[name]
            batch = size.batch_on_cpu if use_cpu else size.batch_on_accelerator
            rates: dict[str, list[float]] = {loop: [] for loop in LOOPS}
            for _ in range(args.rounds):
                order = list(LOOPS)
                shuffle(order)
                for loop in order:
                    rate = images_per_second(loop, size, batch, args.steps, precision == "bf16", use_cpu)
                    rates[loop].append(rate)
            ratios = [
                quartiles([ours / other for ours, other in zip(rates["ViTTrainer"], rates[loop], strict=True)])
                for loop in ("bare loop", "Trainer")
            ]
            cells = [f"{statistics.median(rates[loop]):.4g}" for loop in LOOPS]
            cells += ["{1:.3f} ({0:.3f} to {2:.3f})".format(*ratio) for ratio in ratios]
            lines.append(f"| {name} {precision}, batch {batch} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)

    lines.insert(0, f"Runs of {args.steps} steps.\n")
    suffix = "_cpu" if use_cpu else "_cuda"
    write_results(__file__, "The loop around a training step", lines, args, suffix)


if __name__ == "__main__":
    main()
