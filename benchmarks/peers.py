"""Compare the speed of the model with its peers on the same work, and with the limit of the machine.

    python benchmarks/peers.py                                                 everything
    python benchmarks/peers.py --sizes 32x32 --work training --precision bf16  a part of it
    python benchmarks/peers.py --quick                                         one size, a few minutes
    python benchmarks/peers.py --sizes 32x32 B/16 --compiled                   through torch.compile

A round runs every model once, in a new order. A ratio is the peer's time divided by ours in the same round, so above 1
ours is faster. The results are medians and quartiles over the rounds.

- "ours" is our model after `optimize`, "bare" without it.
- "ours again" is a second copy of ours. The distance of its ratio from 1 shows how far other ratios may vary by
  chance.
- Training is a complete step: forward, loss, backward, AdamW.
- bf16 means autocast in training, as in the Trainer, and bfloat16 weights in inference.
- "default" is what each model has by itself: ours the precision that `speed/hardware.py` chooses, the others fp32.
- "products" are the matrix products of the model alone, forward and backward, with contiguous tensors. On a CPU, each
  uses the library (MKL or oneDNN) that is faster for it. This is the limit for every model that multiplies these
  matrices.
- Peak memory is what the process needs beyond the imported libraries. On a CPU it is measured first, with each model
  in its own process.
- The C library keeps freed memory for all models (`keep_freed_memory`).
"""

import argparse
import gc
import math
import multiprocessing
import random
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification
from vit_pytorch import ViT as VitPytorchViT

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.conversion.bert import BertComposite
from hf_vit_scratch.evaluation.model_card import describe_machine
from hf_vit_scratch.speed.hardware import bf16_is_fast, keep_freed_memory
from hf_vit_scratch.speed.optimize import optimize

SECONDS_PER_MEASUREMENT = 0.4
BUSY = 0.1  # share of the cores that others may take before the machine counts as busy


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and its batch sizes on a CPU and on an accelerator."""

    name: str
    image_size: int
    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_labels: int
    batch_on_cpu: int
    batch_on_accelerator: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the class token."""
        return 1 + (self.image_size // self.patch_size) ** 2


SIZES = {
    size.name: size
    for size in (
        Size("32x32", 32, 4, 256, 12, 8, 10, 64, 1024),
        Size("Ti/16", 224, 16, 192, 12, 3, 1000, 8, 256),
        Size("S/16", 224, 16, 384, 12, 6, 1000, 8, 256),
        Size("B/16", 224, 16, 768, 12, 12, 1000, 8, 128),
    )
}


@dataclass(frozen=True)
class Case:
    """One row of the results."""

    size: Size
    work: str  # inference or training
    precision: str  # fp32, bf16 or default
    compiled: bool
    batch: int
    device: str
    mode: str = "default"  # of torch.compile

    def __str__(self) -> str:
        how = f"compiled ({self.mode})" if self.compiled else "eager"
        return f"{self.size.name} {self.work} {self.precision} {how}, batch {self.batch}"


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits (B, L) of pixels (B, C, height, width)."""
        return self.model(pixel_values).logits


class BertClassifier(nn.Module):
    """`BertModel` of transformers on patches, with a linear classifier of the class token."""

    def __init__(self, size: Size):
        super().__init__()
        config = BertConfig(
            hidden_size=size.hidden_size,
            intermediate_size=4 * size.hidden_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=size.num_tokens,
        )
        patches = nn.Conv2d(3, size.hidden_size, size.patch_size, size.patch_size)
        bert = BertModel(config, add_pooling_layer=False)
        self.encoder = BertComposite(bert, patches, torch.zeros(size.hidden_size))
        self.classifier = nn.Linear(size.hidden_size, size.num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits (B, L) of pixels (B, C, height, width)."""
        return self.classifier(self.encoder(pixel_values).last_hidden_state[:, 0])


def fields(size: Size) -> dict[str, Any]:
    """Return the fields that transformers' configurations and ours have in common."""
    return {
        "image_size": size.image_size,
        "patch_size": size.patch_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "intermediate_size": 4 * size.hidden_size,
        "num_labels": size.num_labels,
    }


def our_config(size: Size) -> ViTScratchConfig:
    """Return the configuration of this package's model."""
    return ViTScratchConfig(**fields(size) | {"norm_first": True})


def build_ours(size: Size) -> nn.Module:
    """Build the model of this package."""
    return Logits(ViTScratchForImageClassification(our_config(size)))


def build_transformers(size: Size) -> nn.Module:
    """Build `ViTForImageClassification` of transformers."""
    return Logits(ViTForImageClassification(ViTConfig(**fields(size))))


def build_timm(size: Size) -> nn.Module:
    """Build `VisionTransformer` of timm."""
    return TimmViT(
        img_size=size.image_size,
        patch_size=size.patch_size,
        embed_dim=size.hidden_size,
        depth=size.num_layers,
        num_heads=size.num_heads,
        num_classes=size.num_labels,
    )


def build_torchvision(size: Size) -> nn.Module:
    """Build `VisionTransformer` of torchvision."""
    return TorchvisionViT(
        image_size=size.image_size,
        patch_size=size.patch_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        hidden_dim=size.hidden_size,
        mlp_dim=4 * size.hidden_size,
        num_classes=size.num_labels,
    )


def build_vit_pytorch(size: Size) -> nn.Module:
    """Build `ViT` of vit-pytorch."""
    return VitPytorchViT(
        image_size=size.image_size,
        patch_size=size.patch_size,
        num_classes=size.num_labels,
        dim=size.hidden_size,
        depth=size.num_layers,
        heads=size.num_heads,
        dim_head=size.hidden_size // size.num_heads,
        mlp_dim=4 * size.hidden_size,
    )


def build_bert(size: Size) -> nn.Module:
    """Build `BertModel` of transformers as an image classifier."""
    return BertClassifier(size)


OPTIMIZED = ("ours", "ours again")
BUILDERS: dict[str, Callable[[Size], nn.Module]] = {
    **dict.fromkeys(OPTIMIZED, build_ours),
    "bare": build_ours,
    "transformers": build_transformers,
    "timm": build_timm,
    "torchvision": build_torchvision,
    "vit-pytorch": build_vit_pytorch,
    "BertModel": build_bert,
}
PEERS = tuple(BUILDERS)[len(OPTIMIZED) :]


def products(case: Case) -> list[tuple[int, int, int, int, int]]:
    """Return the matrix products of a forward pass: how often, how many matrices, and M, K, N of (M, K) x (K, N)."""
    size, batch, width = case.size, case.batch, case.size.hidden_size
    tokens, head_dim = batch * size.num_tokens, width // size.num_heads
    heads = batch * size.num_heads
    return [
        (1, 1, batch * (size.num_tokens - 1), 3 * size.patch_size**2, width),
        (4 * size.num_layers, 1, tokens, width, width),
        (size.num_layers, heads, size.num_tokens, head_dim, size.num_tokens),
        (size.num_layers, heads, size.num_tokens, size.num_tokens, head_dim),
        (size.num_layers, 1, tokens, width, 4 * width),
        (size.num_layers, 1, tokens, 4 * width, width),
        (1, 1, batch, width, size.num_labels),
    ]


def floating_point_operations(case: Case) -> int:
    """Count the operations of the matrix products of one call. A training step needs three times a forward pass."""
    forward = sum(2 * math.prod(numbers) for numbers in products(case))
    return forward * (3 if case.work == "training" else 1)


def limit(case: Case) -> Callable[[], None]:
    """Return a function that computes only the matrix products of one call, each in torch's fastest way."""
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    calls: list[Callable[[], object]] = []
    for times, count, m, k, n in products(case):
        # A linear layer keeps its weight transposed.
        left = torch.randn(*([count] if count > 1 else []), m, k, device=case.device).to(dtype)
        right = torch.randn(*([count] if count > 1 else []), n, k, device=case.device).to(dtype)
        output = torch.randn(*([count] if count > 1 else []), m, n, device=case.device).to(dtype)
        calls += [fastest(left, right, case.device)] * times
        if case.work == "training":  # the gradients of both factors
            calls += [fastest(output, right.mT, case.device), fastest(output.mT, left.mT, case.device)] * times

    @torch.inference_mode()
    def run() -> None:
        for call in calls:
            call()

    return run


@torch.inference_mode()
def fastest(left: Tensor, right: Tensor, device: str) -> Callable[[], object]:
    """Return the fastest call, in a short trial, for (M, K) times the transpose of (N, K)."""
    if device != "cpu" or left.ndim > 2 or not torch.backends.mkldnn.is_available():
        return lambda: left @ right.mT
    ways: list[Callable[[], object]] = [
        lambda: left @ right.mT,
        lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""),
        # A 1x1 convolution of an image with one row: (1, K, 1, M).
        lambda: F.conv2d(left[None, None].permute(0, 3, 1, 2), right[:, :, None, None]),
    ]
    return min(ways, key=lambda way: min(seconds(way, 1, device) for _ in range(5)))


def prepare(name: str, case: Case) -> Callable[[], None]:
    """Return a function that does the work of `case` once with the model called `name`."""
    torch.manual_seed(0)
    if case.precision == "default":
        fast = name in (*OPTIMIZED, "bare", "products") and bf16_is_fast(case.device)
        case = replace(case, precision="bf16" if fast else "fp32")
    if name == "products":
        return limit(case)
    model: Any = BUILDERS[name](case.size).to(case.device)
    images = torch.randn(case.batch, 3, case.size.image_size, case.size.image_size, device=case.device)
    compile_options = {"mode": case.mode} if case.compiled else False
    if case.work == "inference":
        model.eval()
        if case.precision == "bf16":
            model, images = model.to(torch.bfloat16), images.to(torch.bfloat16)
        if name in OPTIMIZED:
            optimize(model.model, images, compile=compile_options)
        forward = torch.compile(model, mode=case.mode) if case.compiled and name not in OPTIMIZED else model

        @torch.inference_mode()
        def infer() -> None:
            forward(images)

        return infer

    model.train()
    if name in OPTIMIZED:
        with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
            optimize(model.model, images, training=True, compile=compile_options)
    forward = torch.compile(model, mode=case.mode) if case.compiled and name not in OPTIMIZED else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.randint(case.size.num_labels, (case.batch,), device=case.device)

    def train() -> None:
        with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def seconds(call: Callable[[], object], times: int, device: str) -> float:
    """Return the mean seconds of a call over `times` calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / times


def share_taken_by_others(patience: float = 1.0) -> float:
    """Return the share of the cores in use while this process waits, including what the host has taken away."""
    return psutil.cpu_percent(interval=patience) / 100


def measure(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per call of each model in each round."""
    calls = {name: prepare(name, case) for name in names}
    repetitions = {}
    for name, call in calls.items():
        call()  # compile, and allocate memory
        call()
        once = seconds(call, 1, case.device)
        repetitions[name] = max(1, math.ceil(SECONDS_PER_MEASUREMENT / once))
    times: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(names)
        shuffle(order)
        for name in order:
            times[name].append(seconds(calls[name], repetitions[name], case.device))
    return times


def peak_memory(name: str, case: Case, connection: Any = None) -> int:
    """Return the peak bytes of two calls. On a CPU, call this in a separate process."""
    if case.device != "cpu":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = psutil.Process().memory_info().rss
    call = prepare(name, case)
    call()
    call()
    if case.device != "cpu":
        return torch.cuda.max_memory_allocated() - before
    needed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if connection is not None:
        connection.send(needed)
    return needed


def peak_memory_in_child(name: str, case: Case) -> int:
    """Return `peak_memory` of a forked child, which has all libraries. It cannot train after a compilation here."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=peak_memory, args=(name, case, sender))
    child.start()
    child.join()
    if not receiver.poll():
        raise RuntimeError(f"{name} did not survive {case}: exit code {child.exitcode}")
    return receiver.recv()


def quartiles(numbers: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def write_results(script: str, title: str, lines: Iterable[str], args: argparse.Namespace, suffix: str = "") -> Path:
    """Print and write the results as Markdown, with a header that says how they were measured.

    Args:
        script: `__file__` of the benchmark.
        title: Title of the results.
        lines: Lines of the results.
        args: Command line, with `rounds` and `output`. By default, `output` is a dated file beside the script.
        suffix: Suffix for the name of the default file.

    Returns:
        Path of the written file.
    """
    machine = describe_machine()
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]])
    head = [
        f"# {title}, {date.today()}",
        "",
        f"`{command}` on {machine['hardware']}, with {torch.get_num_threads()} threads.",
        f"{machine['versions']}, timm {version('timm')}, vit-pytorch {version('vit-pytorch')}.",
        f"Medians of {args.rounds} rounds, and quartiles. What is measured: `{Path(script).name}`.",
        "",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    path = args.output or Path(script).parent / f"{date.today()}_{Path(script).stem}{suffix}.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return path


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases that the command line asks for."""
    for precision in args.precision:
        for work in args.work:
            for name in args.sizes:
                size = SIZES[name]
                batch = size.batch_on_cpu if args.device == "cpu" else size.batch_on_accelerator
                for number in [batch] if work == "training" else [1, batch]:
                    yield Case(size, work, precision, args.compiled, number, args.device, args.mode)


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return the results as lines of Markdown."""
    peers = [name for name in names if name not in ("ours", "products")]
    lines = [
        "| work | ours, images/s | "
        + " | ".join(f"{name} / ours" for name in peers)
        + " | share of the limit | TFLOP/s |",
        "| --- " * (len(peers) + 4) + "|",
    ]
    for row in rows:
        ratios = ["{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ratio"][name]) for name in peers]
        share = "{1:.0%} ({0:.0%} to {2:.0%})".format(*row["ratio"]["products"])
        busy = f"; machine busy by {row['busy']:.0%}" if row["busy"] > BUSY else ""
        cells = [row["case"] + busy, f"{row['images_per_second']['ours']:.4g}", *ratios, share, f"{row['tflops']:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    if any(row["peak_memory"] for row in rows):
        models = list(next(row["peak_memory"] for row in rows if row["peak_memory"]))
        lines += ["", "| peak memory, MB | " + " | ".join(models) + " |", "| --- " * (len(models) + 1) + "|"]
        for row in rows:
            if row["peak_memory"]:
                numbers = [f"{row['peak_memory'][name] / 1e6:.0f}" for name in models]
                lines.append(f"| {row['case']} | " + " | ".join(numbers) + " |")
    return lines


def main() -> None:
    """Measure all cases, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--work", nargs="+", choices=("inference", "training"), default=["inference", "training"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16", "default"), default=["fp32", "bf16"])
    parser.add_argument("--compiled", action="store_true", help="all models through torch.compile")
    parser.add_argument("--mode", default="default", help="of torch.compile; reduce-overhead: CUDA graphs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip_memory", action="store_true")
    parser.add_argument("--quick", action="store_true", help="32x32 in the faster precision: a few minutes")
    parser.add_argument("--output", type=Path, help="result file; by default a dated file beside this script")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.skip_memory = ["32x32"], True
        args.precision = ["bf16" if bf16_is_fast(args.device) else "fp32"]
    names = [*OPTIMIZED, *args.peers, "products"]
    todo = list(cases(args))
    keep_freed_memory()

    memory: dict[Case, dict[str, int]] = {}
    if not args.skip_memory and not args.compiled:
        needed = peak_memory_in_child if args.device == "cpu" else peak_memory
        models = ["ours", *args.peers]
        memory = {case: {name: needed(name, case) for name in models} for case in todo if case.batch > 1}

    rows = []
    for case in todo:
        busy = share_taken_by_others()
        times = measure(case, names, args.rounds)
        ours = statistics.median(times["ours"])
        ratio = {
            name: quartiles([peer / mine for peer, mine in zip(times[name], times["ours"], strict=True)])
            for name in names[1:]
        }
        rows.append(
            {
                "case": str(case),
                "images_per_second": {name: case.batch / statistics.median(times[name]) for name in names},
                "ratio": ratio,
                "tflops": floating_point_operations(case) / ours / 1e12,
                "peak_memory": memory.get(case, {}),
                "busy": busy,
            }
        )
        print(f"{case}: " + ", ".join(f"{name} {ratio[name][1]:.2f}" for name in names[1:]), flush=True)
        if args.compiled:
            torch.compiler.reset()
        gc.collect()

    lines = ["Above 1 ours is the faster.", "", *table(rows, names)]
    suffix = f"_{args.device}{'_compiled' if args.compiled else ''}"
    write_results(__file__, "The model beside its peers", lines, args, suffix)


if __name__ == "__main__":
    main()
