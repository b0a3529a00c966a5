"""The files of a Hugging Face Space that shows the explorer."""

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path

from transformers import ImageClassificationPipeline

from ...errors import UserError

PACKAGE = Path(__file__).parents[2]
APP = """from hf_vit_scratch.interpretation.explorer.app import main

main([{!r}])
"""


def write_space(classifier: ImageClassificationPipeline, name: str, space: Path) -> None:
    """Write a Hugging Face Space that holds the explorer, the model and this package, as a new folder."""
    if space.exists():
        raise UserError(f"--write_space must be a new folder, got {space}.")
    if hasattr(classifier.model, "peft_config"):  # transformers would save the adapter alone
        raise UserError("--write_space needs a model without an adapter: merge it first (docs/guides/lora.md).")
    shutil.copytree(PACKAGE, space / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    classifier.save_pretrained(space / "models" / name)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    card = Path(__file__).with_name("space_card.md").read_text(encoding="utf-8")
    card = card.format(name=name, title=json.dumps(name), gradio=importlib.metadata.version("gradio"), python=python)
    # Gradio is installed in the version that the card names.
    requirements = [line for line in importlib.metadata.requires("hf-vit-scratch") or [] if "extra ==" not in line]
    (space / "app.py").write_text(APP.format(f"models/{name}"), encoding="utf-8")
    (space / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    (space / "README.md").write_text(card, encoding="utf-8")
    (space / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n", encoding="utf-8")
