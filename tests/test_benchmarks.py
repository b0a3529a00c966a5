"""The benchmarks compare like with like, and run."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import data_path  # noqa: E402
import equal_time  # noqa: E402
import finetune_sources  # noqa: E402
import own_images  # noqa: E402
import own_images_data  # noqa: E402
import peers  # noqa: E402
import scaling  # noqa: E402
import training_loop  # noqa: E402
from speedrun import run as speedrun  # noqa: E402

from hf_vit_scratch.conversion.convert import load  # noqa: E402

pytestmark = pytest.mark.slow

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
    call = peers.prepare("ours", case(work=work, precision="bf16"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
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
            shapes.append(builder(SMALL)(images).shape)
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


def test_loops_run():
    rates = [
        training_loop.images_per_second(name, TINY, batch=4, steps=6, bf16=False, use_cpu=True)
        for name in training_loop.LOOPS
    ]
    assert min(rates) > 0


def test_parts_of_the_data_path_run(monkeypatch):
    monkeypatch.setattr(data_path, "SECONDS", 0.01)
    for name, number in {"BATCH": 4, "PHOTOGRAPHS": 16, "SMALL_IMAGES": 64}.items():
        monkeypatch.setattr(data_path, name, number)
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


@pytest.fixture(scope="module")
def little_cifar10():
    """Three random images of each of CIFAR-10's classes."""
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    rows = Dataset.from_dict(
        {"image": [Image.fromarray(image) for image in pixels], "label": [number % 10 for number in range(30)]},
        features=Features({"image": ImageFeature(), "label": ClassLabel(names=names)}),
    )
    return DatasetDict(train=rows, test=rows)


@pytest.mark.parametrize(
    ("name", "count", "labels", "mode", "sides"),
    [
        ("objects_500", 30, 10, "RGB", (86, 116)),
        ("objects_2000", 30, 10, "RGB", (32, 32)),
        ("objects_10000", 30, 10, "RGB", (259, 347)),
        ("cats_and_dogs_grey", 6, 2, "L", (86, 116)),
        ("digits_on_photographs", 30, 9, "RGB", (96, 96)),
        ("upright_or_rotated", 20, 2, "RGB", (64, 64)),
        ("imbalanced", 3, 1, "RGB", (80, 80)),  # the commonest class comes first
    ],
)
def test_images_of_the_benchmark_are_what_its_names_say(name, count, labels, mode, sides, little_cifar10):
    made = own_images_data.DATA_SETS[name](little_cifar10, "train", np.random.default_rng(1))
    items = list(itertools.islice(made, count))

    assert {image.mode for _, image in items} == {mode}
    assert all(sides[0] <= side <= sides[1] for _, image in items for side in image.size)
    assert len({label for label, _ in items}) == labels


@pytest.mark.parametrize("library", finetune_sources.LIBRARIES)
def test_starting_points_are_trained_and_can_be_read(library, class_folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune_sources, "BATCH", 4)
    output = tmp_path / "model"
    argv = ["finetune_sources.py", "--library", library, "--data", str(class_folders), "--minutes", "0.01"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output_dir", str(output)])

    finetune_sources.main()

    heads = {"num_attention_heads": 2} if library == "torchvision" else {}
    loaded = load(str(output / "weights.pt" if heads else output), **heads)
    (passes,) = re.findall(rf"{library}: ([\d.]+) passes", capsys.readouterr().out)
    assert float(passes) > 0
    assert loaded.model.config.num_hidden_layers == 4


@pytest.mark.parametrize("method", own_images.METHODS[1:])
def test_other_methods_train_for_their_time_on_the_same_images(method, class_folders, tmp_path, monkeypatch):
    config = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 32}  # fmt: skip
    settings = {"data": str(class_folders), "config": config, "augmentation": {"crop_padding": 4},
                "mixing": {"mixup_alpha": 1.0, "mixup_prob": 0.5}}  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setattr(own_images, "START", time.perf_counter())

    seconds = 6.0 if method == "transformers_vit" else 2.0  # which measures its speed first
    report = own_images.train_other(method, tmp_path, seconds=seconds, seed=0)

    assert report["passes"] > 1
    assert 0 <= report["accuracy"] <= 1
    assert math.isfinite(report["last_loss"])


def test_table_has_a_row_for_each_data_set_and_time(tmp_path):
    for number, (method, seed, accuracy) in enumerate([("ours", 1, 0.5), ("ours", 0, 0.25), ("timm_vit", 0, 0.125)]):
        result = {"data_set": "a", "minutes": 5.0, "method": method, "seed": seed, "accuracy": accuracy, "passes": 8,
                  "cpu": "a CPU", "cores": "0", "versions": "some"}  # fmt: skip
        (tmp_path / f"{number}.json").write_text(json.dumps(result))

    lines = own_images.table(tmp_path).splitlines()

    assert lines[2] == "| a | 5 | 25.0, 50.0 (8) | 12.5 (8) | not run | not run |"
    assert lines[-1] == "a CPU, one core for each run; some"


@pytest.mark.parametrize(
    ("seconds", "images", "message"),
    [
        (59.0, 10_000, None),
        (61.0, 10_000, "no entry: seed 1 took 61 seconds and was tested on 10000 images"),
        (59.0, 9_999, "no entry: seed 1 took 59 seconds and was tested on 9999 images"),
    ],
)
def test_speedrun_entry_that_breaks_a_rule_is_refused(seconds, images, message, tmp_path, monkeypatch, capsys):
    metrics = {"test_accuracy": 0.5, "test_flip_accuracy": 0.51, "hardware": "a machine", "versions": "torch 2"}
    metrics["per_class"] = {"cat": {"support": 4000.0}, "dog": {"support": images - 4000.0}}
    monkeypatch.setattr(speedrun, "run", lambda options, output_dir: (seconds, metrics))
    argv = ["1", "--data", "cifar10", "--seeds", "1", "2", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *argv, "--", "--max_train_minutes", "0.5"])
    if message is not None:
        with pytest.raises(SystemExit, match=message):
            speedrun.main()
    else:
        speedrun.main()
        row = capsys.readouterr().out.splitlines()[-1]
        assert "| `--max_train_minutes 0.5` | 50.0 (50.0, 50.0) | 51.0 | 59 to 59 |" in row
        table = Path(speedrun.__file__).with_name("README.md").read_text()
        header = next(line for line in table.splitlines() if line.startswith("| CPU |"))
        assert row.count("|") == header.count("|")
