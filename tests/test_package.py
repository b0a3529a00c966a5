import doctest
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_vit_scratch
from hf_vit_scratch.data.sources import load_digits

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, and a folder into which it is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*build, "--wheel-dir", folder, ROOT], check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target"]
    subprocess.run([*install, folder / "installed", wheel], check=True, capture_output=True, timeout=120)
    return wheel, folder / "installed"


def test_wheel_holds_the_package_and_the_command_alone(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = archive.namelist()
    files = (
        "py.typed",
        "recipes/digits.yaml",
        "evaluation/model_card_template.md",
        "interpretation/explorer/page.css",
    )
    assert {f"hf_vit_scratch/{name}" for name in files} | {"vit_scratch.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hf_vit_scratch", "vit_scratch.py"}


RUN_ALL = """
import sys, hf_vit_scratch, vit_scratch
from transformers import AutoConfig, AutoModel  # after the package; PUSH of test_hub.py imports them before it
assert hf_vit_scratch.__file__.startswith(sys.argv[1]), hf_vit_scratch.__file__
sizes = dict(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
assert type(AutoModel.from_config(AutoConfig.for_model("vit_scratch", **sizes))) is hf_vit_scratch.ViTScratchModel
for line in sys.argv[2:]:
    print(f"+ vit-scratch {line}", file=sys.stderr)
    assert vit_scratch.main(line.split()) == 0, line
"""


@pytest.mark.slow
def test_installed_commands_work_without_a_checkout(wheel, tmp_path):
    work, environment = tmp_path / "empty", os.environ | {"PYTHONPATH": str(wheel[1])}
    work.mkdir()
    command = wheel[1] / "bin" / "vit-scratch"
    shown = subprocess.run([command, "--help"], cwd=work, env=environment, capture_output=True, text=True, timeout=120)
    assert "\n  train " in shown.stdout, shown.stderr
    load_digits()["test"][0]["image"].save(tmp_path / "digit.png")
    short = "--max_steps 2 --eval_strategy no --save_strategy no --num_hidden_layers 2 --use_cpu true"
    lines = [
        f"train {short} --disable_tqdm true",
        "recipes",
        "evaluate runs/digits --output_dir report",
        "predict runs/digits ../digit.png --output classes.csv --device cpu",
        "embed runs/digits ../digit.png --output vectors.parquet --device cpu",
        "explain runs/digits ../digit.png --output_dir pictures --device cpu",
        "card runs/digits --output card.md",
    ]

    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(wheel[1]), *lines],
        cwd=work, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    recipe = (work / "runs" / "digits" / "recipe.yaml").read_text()
    assert recipe.startswith(f"# vit-scratch train {short}")
    assert len((work / "classes.csv").read_text().splitlines()) == 2
    assert {"report", "vectors.parquet", "pictures", "card.md"} <= {path.name for path in work.iterdir()}


def test_package_can_be_reloaded():
    importlib.reload(hf_vit_scratch)


@pytest.mark.parametrize(
    "module",
    ["model.configuration_vit_scratch", "model.modeling_vit_scratch", "evaluation.metrics", "evaluation.trust"],
)
def test_examples_in_docstrings(module):
    imported = importlib.import_module(f"hf_vit_scratch.{module}")
    names = {"ViTScratchConfig": hf_vit_scratch.ViTScratchConfig}

    result = doctest.testmod(imported, extraglobs=names)

    assert (result.failed, result.attempted > 0) == (0, True)
