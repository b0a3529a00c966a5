"""The site: `sphinx-build -W -c docs . runs/site`, from the root of the repository."""

import dataclasses
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from transformers import TrainingArguments

from hf_vit_scratch import ViTScratchConfig
from hf_vit_scratch.training.arguments import ARGUMENT_TYPES
from hf_vit_scratch.training.recipe import RECIPES

ROOT = Path(__file__).parents[1]

project = "hf_vit_scratch"
html_show_copyright = False
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/*.md",
    "benchmarks/speedrun/*.md",
    "model_cards/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
]
html_theme = "furo"
html_title = "hf_vit_scratch"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
napoleon_custom_sections = [("Outputs", "params_style")]
smartquotes = False  # they would make one dash of the two of a flag
default_role = "code"  # docstrings have `names` in single backticks
myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings say more: shapes and units
suppress_warnings = ["toc.not_included"]  # the dated figures are reached by links


def flags() -> str:
    """Return tables of the flags of training that this package adds, from the code."""
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    lines = []
    for argument_type in ARGUMENT_TYPES:
        first, *_ = (argument_type.__doc__ or "").splitlines()
        lines += ["", f"**{first}**", "", "| flag | default | meaning |", "| --- | --- | --- |"]
        for field in dataclasses.fields(argument_type):
            if field.name not in theirs:
                default = "" if field.default in (None, dataclasses.MISSING) else f"`{field.default}`"
                lines.append(f"| `--{field.name}` | {default} | {_in_table(field.metadata.get('help', ''))} |")
    return "\n".join(lines)


def recipes() -> str:
    """Return the headers of the recipes that ship with the package."""
    sections = []
    for path in sorted(RECIPES.glob("*.yaml")):
        header = path.read_text(encoding="utf-8").split("\n\n")[0]
        text = re.sub("^# ?", "", header, flags=re.MULTILINE)
        sections.append(f"## {path.stem}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def configuration() -> str:
    """Return the fields of the configuration with their defaults."""
    defaults = ViTScratchConfig().to_dict()
    lines = ["| field | default |", "| --- | --- |"]
    lines += [
        f"| `{field.name}` | `{defaults[field.name]!r}` |"
        for field in dataclasses.fields(ViTScratchConfig)
        if field.name in ViTScratchConfig.__annotations__ and field.name in defaults
    ]
    return "\n".join(lines)


def _in_table(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


class Generated(SphinxDirective):
    """A part of a page that is made from the code."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what the function of this name writes."""
        return self.parse_text_to_nodes(
            {"flags": flags, "recipes": recipes, "configuration": configuration}[self.arguments[0]](),
            allow_section_headings=True,
        )


def unlink_folders(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace links to folders of the repository, which the site does not have, with their text."""
    page = Path(app.env.doc2path(name)).parent

    def replace(match: re.Match[str]) -> str:
        return match[1] if (page / match[2]).is_dir() else match[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)#:]+)\)", replace, source[0])


def setup(app: Sphinx) -> None:
    """Register what this file adds."""
    app.add_directive("generated", Generated)
    app.connect("source-read", unlink_folders)
