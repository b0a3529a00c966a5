"""Run the walkthrough, and write it as notebooks and as one HTML page that needs no network.

    python walkthrough/build.py --output_dir runs/walkthrough

The script stops at the first cell that fails. So it stops at the first claimed equality that does not hold.
"""

import argparse
import html
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from string import Template

import jupytext
import nbformat
from latex2mathml.converter import convert as to_mathml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

FOLDER = Path(__file__).parent
STEPS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
TITLE = "From a matrix to a Vision Transformer"
TIMEOUT_SECONDS = 600  # for one cell
# HTML that makes a browser fetch something. Links (`<a href>`) do not.
REQUESTS = re.compile(
    r"""<(?:script|iframe|link|object|embed)\b[^>]*>|<[^>]*\bsrc(?:set)?=["']?(?!["']?data:)[^>]*>|@import[^;]*|"""
    r"""\burl\(["']?(?!["']?data:)[^)]*\)"""
)

# Every step starts in an empty namespace. All steps share one process, because importing the libraries takes longer
# than most steps. Pictures have the size that the code gives them, with two pixels for each pixel of the page.
PREPARE = """import warnings
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm would draw its bars with ipywidgets
%reset -f
%matplotlib inline
%config InlineBackend.figure_formats = ["retina"]
%config InlineBackend.print_figure_kwargs = {"bbox_inches": None}"""

# Fold the code of cells that draw a picture. Such a cell has an alternative text.
CELLS = """{%- extends "basic/index.html.j2" -%}
{% block input %}{% if cell.metadata.alt %}<details><summary>code of the picture</summary>{{ super() }}</details>
{% else %}{{ super() }}{% endif %}{% endblock %}"""


class StepError(Exception):
    """A cell of the walkthrough failed."""


class PageError(Exception):
    """The page breaks a rule of `check_page`."""


def read_step(path: Path) -> NotebookNode:
    """Return a step as a notebook, not yet executed. Fixed cell ids make a rebuilt notebook identical."""
    notebook = jupytext.read(path, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{path.stem[:2]}-{index}"
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        }
    )
    return notebook


def execute(notebooks: dict[str, NotebookNode]) -> None:
    """Run notebooks one after the other, in place.

    Args:
        notebooks: Notebooks by the name of their step.

    Raises:
        StepError: A cell failed or wrote a warning. The message names the step and the cell.
    """
    run = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        run.cells += [nbformat.v4.new_code_cell(PREPARE), *notebook.cells]  # the cells themselves, not copies
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        run,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        for name, notebook in notebooks.items():
            for number, cell in enumerate(notebook.cells, start=1):
                if any(output.output_type == "error" for output in cell.get("outputs", ())):
                    raise StepError(
                        f"{name}, cell {number}: {error.ename}: {error.evalue}\n\n{cell.source}"
                    ) from error
        raise
    for name, notebook in notebooks.items():
        code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for count, cell in enumerate(code_cells, start=1):
            cell.execution_count = count
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    raise StepError(f"{name}, code cell {count}, warns: {output.text}")


def to_html(notebook: NotebookNode) -> str:
    """Return the cells of an executed notebook as HTML, with formulas as MathML, which browsers can draw."""
    notebook, formulas = nbformat.from_dict(notebook), []

    def keep(match: re.Match[str]) -> str:
        block, inline = match.groups()
        formulas.append(to_mathml(block or inline, display="block" if block else "inline"))
        return f"FORMULA{len(formulas) - 1}END"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\$\$(.+?)\$\$|\$(.+?)\$", keep, cell.source, flags=re.DOTALL)
    exporter = HTMLExporter(
        raw_template=CELLS, exclude_input_prompt=True, exclude_output_prompt=True, exclude_anchor_links=True
    )
    body, _ = exporter.from_notebook_node(notebook)
    return re.sub(r"FORMULA(\d+)END", lambda match: formulas[int(match[1])], body)


def make_page(notebooks: dict[str, NotebookNode]) -> str:
    """Return all executed notebooks as one page.

    Raises:
        PageError: A picture has no alternative text, or the page would request something from elsewhere.
    """
    contents, sections = [], []
    for name, notebook in notebooks.items():
        heading = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        contents.append(f'<li><a href="#{name}">{html.escape(heading.partition(". ")[2])}</a></li>')
        sections.append(f'<section id="{name}">\n{to_html(notebook)}\n</section>')
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "transformers"))
    page = Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        title=TITLE,
        light=light,
        dark=dark,
        contents="\n".join(contents),
        sections="\n".join(sections),
        libraries=libraries,
    )
    check_page(page)
    return page


def check_page(page: str) -> None:
    """Check that a page needs nothing from elsewhere.

    Raises:
        PageError: A picture has no alternative text, or the page would request something from elsewhere.
    """
    for tag in re.findall(r"<img\b[^>]*>", page):
        if not re.search(r'\balt="[^"]+"', tag):
            raise PageError(f'A picture has no alternative text: {tag[:60]}... Its cell needs `# %% alt="..."`.')
    if found := REQUESTS.search(page):
        raise PageError(f"The page would request something: {found[0][:100]}")


def build(steps: Sequence[Path], output_dir: Path) -> Path:
    """Run steps, write their notebooks and the page, and return the path of the page."""
    notebooks = {path.stem: read_step(path) for path in steps}
    execute(notebooks)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, notebook in notebooks.items():
        nbformat.write(notebook, output_dir / f"{name}.ipynb")
    path = output_dir / "index.html"
    path.write_text(make_page(notebooks), encoding="utf-8")
    return path


def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/walkthrough"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        print(build(STEPS, args.output_dir))
    except (StepError, PageError) as error:
        print(f"build.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
