"""The walkthrough: every step runs, what it asserts can fail, and the page stands alone."""

import importlib.util
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from hf_vit_scratch.model import reference

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "walkthrough"
STEPS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def load_build():
    spec = importlib.util.spec_from_file_location("walkthrough_build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.fixture
def run(monkeypatch):
    """Run a step in this process."""
    plt.switch_backend("agg")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    yield lambda path: runpy.run_path(str(path))
    plt.close("all")


# The steps


def test_steps_are_numbered_from_1_to_12():
    assert [path.stem[:2] for path in STEPS] == [f"{number:02}" for number in range(1, 13)]


def test_every_step_runs_and_draws_and_the_page_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where step 11 leaves its model for step 12

    page = build.build(STEPS, tmp_path / "page").read_text(encoding="utf-8")

    for path in STEPS:
        section = page.partition(f'<section id="{path.stem}">')[2].partition("</section>")[0]
        assert "<img" in section


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_step_has_a_heading_an_assertion_and_ends_in_a_described_picture(path):
    cells = build.read_step(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]

    assert cells[0].source.startswith(f"# {int(path.stem[:2])}. ")
    assert any("\nassert " in f"\n{cell.source}" for cell in code)
    assert code[-1].source.endswith("plt.show()")
    assert cells[-1].cell_type == "markdown"
    for cell in code:
        assert ("plt.show()" in cell.source) == bool(cell.metadata.get("alt"))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (1, "softmax"),
        (2, "attention_head"),
        (3, "multi_head_attention"),
        (4, "softmax"),
        (5, "residual_stack"),
        (6, "patch_embedding"),
        (8, "encoder_layer"),
    ],
)
def test_step_stops_at_a_small_fault(run, monkeypatch, step, name):
    right = getattr(reference, name)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (1.000001 * result[0], *result[1:]) if isinstance(result, tuple) else 1.000001 * result

    monkeypatch.setattr(reference, name, wrong)

    with pytest.raises(AssertionError):
        run(STEPS[step - 1])


# The page


PICTURE = """
# %% alt="a rising line"
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
"""


def write_step(folder, code, name="01_made_up"):
    path = folder / f"{name}.py"
    path.write_text(f"# %% [markdown]\n# # {int(name[:2])}. A & B\n#\n# $x_1$\n\n# %%\n{code}\n", encoding="utf-8")
    return path


def test_page_and_notebooks(tmp_path):
    steps = [write_step(tmp_path, f"print('out' + 'put')\n{PICTURE}", name) for name in ("01_first", "02_second")]

    path = build.build(steps, tmp_path / "page")

    page = path.read_text(encoding="utf-8")
    assert page.count("<img") == page.count('src="data:image/png;base64,') == page.count('alt="a rising line"') == 2
    assert page.count("<math") == 2
    assert page.count("code of the picture") == 2
    assert page.count("output\n") == 2
    for step in steps:
        assert f'<a href="#{step.stem}">A &amp; B</a>' in page
        assert f'<section id="{step.stem}">' in page
        notebook = nbformat.read(tmp_path / "page" / f"{step.stem}.ipynb", as_version=4)
        assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2]
        assert "image/png" in notebook.cells[2].outputs[0].data
        assert notebook.cells[0].source.endswith("$x_1$")
    assert str(FOLDER.parent) not in page


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("assert 1 + 1 == 3, 'no'", r"01_made_up, cell 2: AssertionError: no"),
        ("import warnings\nwarnings.warn('look out')", r"01_made_up, code cell 1, warns: .*look out"),
    ],
    ids=["error", "warning"],
)
def test_failing_cell_is_named(tmp_path, code, message):
    with pytest.raises(build.StepError, match=message):
        build.build([write_step(tmp_path, code)], tmp_path)


def test_names_of_one_step_are_not_known_in_the_next(tmp_path):
    steps = [write_step(tmp_path, "made_up = 1"), write_step(tmp_path, "print(made_up)", "02_next")]

    with pytest.raises(build.StepError, match=r"02_next, cell 2: NameError"):
        build.build(steps, tmp_path)


@pytest.mark.parametrize(
    "html",
    [
        '<script src="x.js"></script>',
        "<script>fetch('https://example.org')</script>",
        '<link rel="stylesheet" href="https://example.org/x.css">',
        '<img alt="a" src="https://example.org/x.png">',
        '<img alt="a" src="x.png">',
        "<style>@import 'https://example.org/x.css';</style>",
        "<style>p { background: url(https://example.org/x.png) }</style>",
        '<style>p { background: url("x.png") }</style>',
        '<iframe src="https://example.org"></iframe>',
    ],
)
def test_page_that_would_request_something_is_refused(html):
    with pytest.raises(build.PageError, match="would request something"):
        build.check_page(f"<html><body>{html}</body></html>")


@pytest.mark.parametrize("alt", ["", ' alt=""'], ids=["none", "empty"])
def test_picture_without_alternative_text_is_refused(alt):
    with pytest.raises(build.PageError, match="no alternative text"):
        build.check_page(f'<img src="data:image/png;base64,AAAA"{alt}>')


def test_page_with_links_and_embedded_pictures_is_accepted():
    build.check_page('<a href="https://example.org">there</a><img src="data:image/png;base64,AAAA" alt="a square">')


def test_formulas_become_mathml():
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("With $a_1$:\n\n$$\\frac{a}{b * c * d}$$")]
    )

    html = build.to_html(notebook)

    assert "<msub><mi>a</mi><mn>1</mn></msub>" in html
    assert "<mfrac>" in html
    assert 'display="block"' in html
    assert "<em>" not in html
    assert notebook.cells[0].source.startswith("With $a_1$")  # the notebook itself keeps its source
    assert html.count("<math") == 2
