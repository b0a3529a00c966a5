"""A module imports only from lower layers of the package (CONTRIBUTING.md has the reasons)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = {
    "errors": 0,
    "machine": 0,
    "configuration_vit_scratch": 0,
    "reference": 0,
    "batch_transforms": 0,
    "image_files": 1,
    "modeling_vit_scratch": 1,
    "data": 2,
    "augmentation": 1,
    "optimization": 1,
    "figures": 1,
    "metrics": 1,
    "arguments": 2,
    "whitening": 2,
    "masking": 3,
    "streaming": 3,
    "predict": 3,
    "attention_maps": 4,
    "explorer": 5,
    "trainer": 4,
    "auto_config": 3,
    "inspection": 5,
    "cards": 2,
    "conversion": 2,
    "equivalence": 3,
    "checkpoints": 4,
}
PACKAGE = Path(__file__).parents[1] / "src" / "hf_vit_scratch"


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert node.module is not None, "the Hub does not follow `from . import x`"
            found.add(node.module)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith("hf_vit_scratch") for name in names), "import with one leading dot"
    return found


def test_every_module_has_a_layer():
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_module_imports_downwards(module):
    assert all(LAYERS[imported] < LAYERS[module] for imported in own_imports(module))


def test_model_files_stand_alone():
    assert own_imports("configuration_vit_scratch") == set()
    assert own_imports("modeling_vit_scratch") == {"configuration_vit_scratch"}


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, hf_vit_scratch; print({'torch', 'transformers', 'datasets', 'evaluate'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)

    assert (done.stdout.strip(), done.stderr.strip()) == ("set()", "")
