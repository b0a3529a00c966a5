import doctest
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_vit_scratch

ROOT = Path(__file__).parents[1]


def test_wheel_builds_and_imports_elsewhere(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*build, "--wheel-dir", tmp_path, ROOT], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target"]
    subprocess.run([*install, tmp_path / "elsewhere", wheel], check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    code = "import hf_vit_scratch; print(hf_vit_scratch.__file__, hf_vit_scratch.ViTScratchConfig().grid_size)"
    env_path = str(tmp_path / "elsewhere")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {env_path!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    files = (
        "py.typed",
        "recipes/digits.yaml",
        "evaluation/model_card_template.md",
        "interpretation/explorer/page.css",
    )
    assert {f"hf_vit_scratch/{name}" for name in files} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "accelerate_configs", "train")) for name in names)
    assert done.stdout.split(maxsplit=1) == [f"{env_path}/hf_vit_scratch/__init__.py", "(14, 14)\n"], done.stderr


def test_package_can_be_reloaded():
    importlib.reload(hf_vit_scratch)


@pytest.mark.parametrize(
    "imports",
    [
        "import hf_vit_scratch\nfrom transformers import AutoModel",
        "from transformers import AutoModel\nimport hf_vit_scratch",
    ],
)
def test_auto_classes_know_the_model_whichever_is_imported_first(imports):
    code = f"""{imports}
from transformers import AutoConfig
sizes = dict(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
print(type(AutoModel.from_config(AutoConfig.for_model("vit_scratch", **sizes))).__name__)"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.stdout.strip() == "ViTScratchModel", done.stderr


@pytest.mark.parametrize(
    "module", ["model.configuration_vit_scratch", "model.modeling_vit_scratch", "evaluation.metrics"]
)
def test_examples_in_docstrings(module):
    imported = importlib.import_module(f"hf_vit_scratch.{module}")
    names = {"ViTScratchConfig": hf_vit_scratch.ViTScratchConfig}

    result = doctest.testmod(imported, extraglobs=names)

    assert (result.failed, result.attempted > 0) == (0, True)
