"""Measure how the cost of a training step grows with batch, image size and depth, and the gain of a second process.

    python benchmarks/scaling.py

The script measures complete training steps of the 32x32 model of `peers.py`, in the precision of the machine. It
changes one number at a time. Every round measures all points in turn. The results are medians and quartiles.

Two processes use `DistributedDataParallel`, over gloo on a CPU or nccl on accelerators, with the same batch for each
process. On a CPU each process has one thread, and so has the single process that they are compared with.
"""

import argparse
import random
import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from peers import SIZES, Case, Size, build_ours, floating_point_operations, prepare, quartiles, seconds, write_results
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hf_vit_scratch.speed.hardware import bf16_is_fast
from hf_vit_scratch.speed.optimize import optimize

BASE = SIZES["32x32"]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
IMAGE_SIZES = (16, 24, 32, 48, 64, 96)
DEPTHS = (1, 2, 4, 8, 12, 24)
STEPS = 8  # timed steps with several processes


def curves(device: str, precision: str, batch: int) -> dict[str, dict[int, Case]]:
    """Return the points of each curve."""

    def case(size: Size, batch: int) -> Case:
        return Case(size, "training", precision, compiled=False, batch=batch, device=device)

    return {
        "batch": {number: case(BASE, number) for number in BATCHES},
        "image size": {pixels: case(replace(BASE, image_size=pixels), batch) for pixels in IMAGE_SIZES},
        "layers": {depth: case(replace(BASE, num_layers=depth), batch) for depth in DEPTHS},
    }


def train_in_process(rank: int, world_size: int, port: int, batch: int, bf16: bool, results: Any) -> None:
    """Take training steps as one of `world_size` processes, and put the seconds of a step into `results`."""
    on_cpu = not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if on_cpu:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    images = torch.randn(batch, 3, BASE.image_size, BASE.image_size, device=device)
    model: Any = build_ours(BASE).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        optimize(model.model, images, training=True)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.randint(BASE.num_labels, (batch,), device=device)
    for step in range(STEPS + 2):
        if step == 2:
            torch.distributed.barrier()
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()  # waits for the device
    torch.distributed.barrier()
    if rank == 0:
        results.put((time.perf_counter() - start) / STEPS)
    torch.distributed.destroy_process_group()


def images_per_second(world_size: int, batch: int, bf16: bool) -> float:
    """Return the images per second of `world_size` processes together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(train_in_process, (world_size, port, batch, bf16, results), nprocs=world_size)
    return world_size * batch / results.get()


def main() -> None:
    """Measure all points, and print, write and draw the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="Markdown file, with a PNG beside it; by default a dated file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = BASE.batch_on_cpu if device == "cpu" else BASE.batch_on_accelerator
    bf16 = bf16_is_fast(device)
    points = curves(device, "bf16" if bf16 else "fp32", batch)

    processes: dict[int, list[float]] = {1: [], 2: []} if device == "cpu" or torch.cuda.device_count() > 1 else {}
    for _ in range(args.rounds):
        for number in processes:
            processes[number].append(images_per_second(number, batch, bf16))

    calls = {(curve, x): prepare("ours", case) for curve, cases in points.items() for x, case in cases.items()}
    times: dict[tuple[str, int], list[float]] = {point: [] for point in calls}
    for call in calls.values():
        call()
    shuffle = random.Random(0).shuffle
    for _ in range(args.rounds):
        order = list(calls)
        shuffle(order)
        for point in order:
            times[point].append(seconds(calls[point], 2, device))

    lines = [
        f"{'bf16' if bf16 else 'fp32'}; hidden size {BASE.hidden_size}, {BASE.num_layers} layers, patches of "
        f"{BASE.patch_size}, batch {batch}, but for one.",
    ]
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, (curve, cases) in zip(figure.subplots(1, 3), points.items(), strict=True):
        lines += ["", f"| {curve} | ms per image | images/s | GFLOP/s |", "| --- | --- | --- | --- |"]
        middle = []
        for x, case in cases.items():
            low, median, high = quartiles([1e3 * number / case.batch for number in times[curve, x]])
            rate = floating_point_operations(case) / statistics.median(times[curve, x]) / 1e9
            lines.append(f"| {x} | {median:.3g} ({low:.3g} to {high:.3g}) | {1e3 / median:.4g} | {rate:.0f} |")
            middle.append(median)
        axes.loglog(list(cases), middle, marker="o", base=2)
        axes.set(xlabel=curve, ylabel="ms per image")
        axes.grid(alpha=0.3)
    if processes:
        gain = quartiles([two / one for one, two in zip(processes[1], processes[2], strict=True)])
        lines += ["", "| processes | images/s |", "| --- | --- |"]
        lines += [f"| {number} | {statistics.median(rates):.4g} |" for number, rates in processes.items()]
        lines += ["", "Two processes to one: {1:.2f} ({0:.2f} to {2:.2f}).".format(*gain)]
    path = write_results(__file__, "What a training step costs", lines, args, f"_{device}")
    figure.savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
