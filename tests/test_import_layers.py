"""A folder of the package imports only from the folders before it (CONTRIBUTING.md has the reasons)."""

import ast
from pathlib import Path

import pytest

ROOMS = ("errors", "model", "speed", "data", "evaluation", "conversion", "training", "interpretation")
PACKAGE = Path(__file__).parents[1] / "src" / "hf_vit_scratch"
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))


def own_imports(module: Path) -> set[Path]:
    """The modules of the package that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / module).with_suffix(".py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = Path(*module.parts[: len(module.parts) - node.level], *(node.module or "").split("."))
            is_folder = (PACKAGE / source).is_dir()
            assert not (is_folder and module.parts[0] == "model"), "the Hub does not follow `from . import x`"
            found |= {source / alias.name for alias in node.names} if is_folder else {source}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith("hf_vit_scratch") for name in names), "import with leading dots"
    return found


def test_every_module_has_a_room():
    assert {module.parts[0] for module in MODULES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("module", [module for module in MODULES if module.parts[0] in ROOMS], ids=str)
def test_module_imports_from_its_own_room_and_the_rooms_before_it(module):
    for imported in own_imports(module):
        assert (PACKAGE / imported).with_suffix(".py").is_file()
        assert ROOMS.index(imported.parts[0]) <= ROOMS.index(module.parts[0]), f"{module} imports {imported}"


@pytest.mark.parametrize("room", ROOMS[1:])
def test_imports_within_a_room_have_no_cycle(room):
    imports = {m: {i for i in own_imports(m) if i.parts[0] == room} for m in MODULES if m.parts[0] == room}
    while free := {module for module, imported in imports.items() if not imported & imports.keys()}:
        imports = {module: imported for module, imported in imports.items() if module not in free}
    assert not imports


def test_model_files_stand_alone():
    assert own_imports(Path("model/configuration_vit_scratch")) == set()
    assert own_imports(Path("model/modeling_vit_scratch")) == {Path("model/configuration_vit_scratch")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_and_functions_are_short(module):
    text = (PACKAGE / module).with_suffix(".py").read_text()
    assert len(text.splitlines()) <= 500 or module.name == "modeling_vit_scratch"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            described = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert node.end_lineno - node.lineno + 1 - described <= 60, node.name
