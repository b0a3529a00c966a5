"""Arguments from a recipe in YAML and from the command line."""

import difflib
import json
import re
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from transformers import HfArgumentParser

from ..errors import UserError, blame_the_user
from ..model.configuration_vit_scratch import VARIANTS, ViTScratchConfig
from .arguments import ARGUMENT_TYPES, Arguments, AugmentationArguments, ModelArguments


class RecipeParser(HfArgumentParser):
    """transformers' parser, with errors of one line that guess what was meant."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of 140 flags."""
        raise UserError(f"{message[:1].lower()}{message[1:]}. Run train.py --help for the flags.")


def parse_recipe(argv: Sequence[str], default_recipe: Path) -> tuple[Arguments, str]:
    """Build the arguments from a recipe and flags: `[recipe.yaml] [--flag value ...]`.

    Precedence, lowest first: the dataclasses' defaults, the recipe, the flags. A recipe is a flat YAML mapping from
    names of flags to values.

    Args:
        argv: The command line, without the program's name.
        default_recipe: The recipe if the command line names none.

    Returns:
        The arguments, and the resolved recipe as YAML: all that the recipe and the flags have set.

    Raises:
        UserError: A file, a key, a flag or a value is wrong.
    """
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        recipe_path = Path(argv.pop(0))
    elif any(argument.split("=")[0] == "--data" for argument in argv):
        raise UserError(
            "--data needs a recipe before it, such as: train.py recipes/cifar10_cpu.yaml --data FOLDER. The default "
            "recipe fits the digits only."
        )
    else:
        recipe_path = default_recipe
    recipe = _read_recipe(recipe_path)

    parser = RecipeParser(
        ARGUMENT_TYPES,
        prog="train.py",
        usage="train.py [recipe.yaml] [--flag value ...]",
        description="Train a Vision Transformer from scratch. A flag overrides the recipe's value.",
        allow_abbrev=False,
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    known = [flag.name for argument_type in ARGUMENT_TYPES for flag in fields(argument_type)]
    for key in recipe:
        if key not in known:
            raise UserError(f"{recipe_path}: unknown key {key!r}.{_guess(key, known)}")
    for argument in argv:
        name = argument.removeprefix("--").split("=")[0].replace("-", "_")
        if (
            argument.startswith("--")
            and name not in known
            and name.removeprefix("no_") not in known
            and name != "help"
        ):
            raise UserError(f"unknown flag {argument.split('=')[0]}.{_guess(name, known, prefix='--')}")

    # A recipe is the beginning of the command line: the same types, the same checks, and what comes later wins.
    recipe_argv = [argument for key, value in recipe.items() for argument in _as_arguments(key, value)]
    given = _explicit(parser, recipe_argv) | _explicit(parser, argv)
    with blame_the_user():  # TrainingArguments checks its values itself
        parsed = parser.parse_args_into_dataclasses([*recipe_argv, *argv], look_for_args_file=False)
    given.pop("resume_from_checkpoint", None)  # the resolved recipe starts a run afresh
    return cast(Arguments, parsed), yaml.safe_dump(
        {name: given[name] for name in known if name in given}, sort_keys=False
    )


def model_config(args: ModelArguments, label_names: Sequence[str]) -> tuple[ViTScratchConfig, str | None]:
    """The configuration that the flags describe, for these classes, and the saved model to start from, if any.

    Raises:
        UserError: A field is impossible, or there is no such model.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    model = given.pop("model", None)
    for name in ("image_size", "patch_size"):
        if name in given and len(given[name]) == 1:
            given[name] = given[name][0]
    given["id2label"] = dict(enumerate(label_names))
    given["label2id"] = {name: index for index, name in enumerate(label_names)}
    try:
        if model is None:
            return ViTScratchConfig(**given), None
        if re.fullmatch(rf"({'|'.join(VARIANTS)})/\d+", model):
            return ViTScratchConfig.from_variant(model, **given), None
        config = ViTScratchConfig.from_pretrained(model, **given)
        config.validate()
        return config, model
    except OSError as error:
        raise UserError(
            f"--model {model} is neither a size such as S/16 (sizes {', '.join(VARIANTS)}, then the patch size), "
            "nor a folder of a saved model of ours, nor the name of one on the Hub that is within reach."
        ) from error
    except (ValueError, TypeError) as error:  # already in our own words
        raise UserError(str(error)) from error


def stage_arguments(args: AugmentationArguments, config: ViTScratchConfig) -> dict[str, Any]:
    """The arguments of `training_stages`, for a model.

    Raises:
        UserError: The model cannot take the initial image size.
    """
    given = dict(vars(args))
    size = given["initial_image_size"]
    if size is not None:
        pair = (*size, *size)[:2]
        for axis, pixels, patch in zip(("height", "width"), pair, config.patch_height_width, strict=True):
            if pixels < patch or pixels % patch != 0:
                raise UserError(
                    f"initial_image_size ({axis} {pixels}) must be divisible by patch_size ({axis} {patch})."
                )
        given["initial_image_size"] = pair
    return given


def _read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as text: the flags' own types read the values, so that `1e-3` is a number and `no` is a word."""
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{path}: the recipe cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the recipe is no YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: a recipe must be lines of `key: value`, got {type(recipe).__name__}.")
    return recipe


def _as_arguments(key: str, value: Any) -> list[str]:
    if value in ("", "~", "null"):
        return []  # the default
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]


def _explicit(parser: RecipeParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that `argv` sets, with their values, and no defaults."""
    given = {re.sub("^no_", "", a.removeprefix("--").split("=")[0].replace("-", "_")) for a in argv if a[:2] == "--"}
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if name in given}


def _guess(name: str, known: Sequence[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix}{match[0]}?" if match else " Run train.py --help for the known ones."
