"""The benchmarks compare like with like, and run."""

import dataclasses
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import data_path  # noqa: E402
import equal_time  # noqa: E402
import peers  # noqa: E402
import scaling  # noqa: E402
import training_loop  # noqa: E402

TINY = peers.Size("tiny", 16, 4, 32, 2, 2, 10, 4, 4)
SMALL = dataclasses.replace(peers.SIZES["32x32"], num_layers=3)


@pytest.fixture
def tiny(monkeypatch):
    """One small size in the place of all, and short measurements."""
    monkeypatch.setattr(peers, "SIZES", {"tiny": TINY})
    monkeypatch.setattr(peers, "SECONDS_PER_MEASUREMENT", 0.001)
    monkeypatch.setattr(peers, "share_taken_by_others", lambda: 0.5)


def case(size=SMALL, work="inference", batch=2, precision="fp32"):
    return peers.Case(size, work, precision, compiled=False, batch=batch, device="cpu")


@pytest.mark.parametrize("work", ["inference", "training"])
def test_operations_are_those_that_torch_counts(work):
    call = peers.prepare("ours", case(work=work, precision="bf16"))  # with the attention written out
    with FlopCounterMode(display=False) as counter:
        call()

    # The gradient of the pixels is not computed: one product of the patch embedding less.
    patches = 2 * 2 * 64 * 48 * 256 * (work == "training")
    assert counter.get_total_flops() == peers.floating_point_operations(case(work=work)) - patches


@pytest.mark.parametrize("work", ["inference", "training"])
def test_limit_multiplies_just_these_matrices(work):
    call = peers.prepare("products", case(work=work))
    onednn = {torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0]}
    with FlopCounterMode(display=False, custom_mapping=onednn) as counter:
        call()

    assert counter.get_total_flops() == peers.floating_point_operations(case(work=work))


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_do_the_same_work(name):
    images = torch.randn(2, 3, 32, 32)
    flops, shapes = [], []
    for builder in (peers.BUILDERS[name], peers.build_ours):
        # With gradients, and by products: torch cannot count its fused inference, and 2.11 not its fused attention.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            shapes.append(builder(SMALL, "eager")(images).shape)
        flops.append(counter.get_total_flops())

    assert shapes == [(2, 10), (2, 10)]
    assert flops[0] == pytest.approx(flops[1], rel=0.01)


def test_peers_are_written_beside_each_other(tiny, monkeypatch, tmp_path):
    output = tmp_path / "results.md"
    argv = ["peers.py", "--work", "training", "--precision", "fp32", "--rounds", "2", "--skip_memory"]
    monkeypatch.setattr(sys, "argv", [*argv, "--device", "cpu", "--output", str(output)])

    peers.main()

    header, _, row = [line for line in output.read_text().splitlines() if line.startswith("|")]
    assert all(f"{name} / ours" in header for name in ("ours again", *peers.PEERS))
    assert "tiny training fp32 eager, batch 4; machine busy by 50%" in row
    assert row.count("|") == header.count("|")


def test_peak_memory_grows_with_the_batch():
    cases = [case(work="training", batch=batch) for batch in (2, 64)]
    # From a fresh process: where training was ever compiled, as in other tests, no child can compute gradients.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        few, many = fresh.map(peers.peak_memory_in_child, ["ours", "ours"], cases)

    assert many > 2 * few > 0


def test_loops_take_their_steps():
    rates = [
        training_loop.images_per_second(name, TINY, batch=4, steps=6, bf16=False, use_cpu=True)
        for name in training_loop.LOOPS
    ]
    assert min(rates) > 0


def test_parts_of_the_data_path_run(monkeypatch):
    monkeypatch.setattr(data_path, "SECONDS", 0.01)
    parts = dict(data_path.parts(torch.device("cpu"), workers=[0]))
    assert len(parts) == 8
    assert all(measure() > 0 for measure in parts.values())


def test_costs_at_equal_time_are_beside_the_first_choice(monkeypatch):
    monkeypatch.setattr(equal_time, "BATCH", 2)
    choices = {"first": {}, "second": {"num_hidden_layers": 1}}
    steppers = {name: equal_time.stepper(equal_time.build(fields)) for name, fields in choices.items()}

    costs = equal_time.relative_costs(steppers, first=0.5, rounds=3)

    assert costs["first"] == 1
    assert costs["second"] > 0


def test_two_processes_train():
    assert scaling.images_per_second(world_size=2, batch=2, bf16=False) > 0
