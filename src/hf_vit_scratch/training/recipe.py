"""The recipe of a run: every setting, where it comes from, and how it becomes arguments."""

import difflib
import json
import math
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from transformers import HfArgumentParser

from ..conversion.names import as_number
from ..errors import UserError, blame_the_files, blame_the_user
from ..model.configuration_vit_scratch import ViTScratchConfig
from .arguments import ARGUMENT_TYPES, DEFAULTS, Arguments, ModelArguments, is_starting_model

RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = "recipe.yaml"
FACTS = "_run.json"  # a name that begins with "_" is never pushed

Origin = Literal["recipe", "flag", "images", "machine"]

# These may differ from a starting model's. Its weights decide all other fields.
FREE_FIELDS = {
    "model", "image_size", "initializer_range", "patch_initializer_range", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "drop_path_rate", "attn_implementation",
}  # fmt: skip
ARCHITECTURE = {field.name for field in fields(ModelArguments)} - FREE_FIELDS
# What a recipe sets for its own model, and not for the one that a flag names.
RECIPE_MODEL = ARCHITECTURE | {
    "image_size", "initial_image_size", "initial_image_size_fraction", "whiten_patches", "local_attention",
}  # fmt: skip
# What a recipe sets to suit its value of another flag. If the command line changes that flag, it is left out.
BELONGS_TO = {
    "learning_rate": {"muon_learning_rate"},
    "lr_scheduler_type": {"lr_scheduler_kwargs"},
    "muon": {"muon_learning_rate", "muon_beta2"},
    "position_embedding_type": {"local_attention"},
    "qkv_bias": {"local_attention"},
    "qk_norm": {"local_attention"},
    "model": {
        "patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "initial_image_size", "initial_image_size_fraction",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A value of a flag, where it comes from, and why it was chosen, if nobody gave it."""

    value: Any
    origin: Origin
    reason: str = ""


@dataclass
class Recipe:
    """What a run is made of."""

    settings: dict[str, Setting] = field(default_factory=dict)  # what file, flags and choices set, by names of flags
    data: str = ""  # source of the images, as an absolute path if it is local
    fingerprint: str = ""  # of the splits; empty for a stream
    processes: int = 1
    machine_choices: list[str] = field(default_factory=list)  # a line each; another machine may choose otherwise
    left_out: list[str] = field(default_factory=list)  # what the file sets, and flags of the command line replace

    def add(self, values: Mapping[str, Any], origin: Origin, reason: str = "") -> None:
        """Set values that belong together."""
        self.settings |= {name: Setting(value, origin, reason) for name, value in values.items()}

    def values(self, *origins: Origin) -> dict[str, Any]:
        """Return the values of these origins; of all, if none is named."""
        return {name: s.value for name, s in self.settings.items() if s.origin in origins or not origins}

    def choices(self) -> list[str]:
        """Return what was chosen for the images, with the reasons, a line for each group of settings."""
        chosen = [(name, s) for name, s in self.settings.items() if s.origin == "images"]
        return [
            ", ".join(f"{name} {as_number(setting.value)}" for name, setting in group) + f": {reason}"
            for reason, group in groupby(chosen, key=lambda item: item[1].reason)
        ]

    def save(self, folder: Path, command: str) -> None:
        """Write the recipe for people, as YAML that starts the same run again, and its facts for a resumed run."""
        text = f"# {command}\n" + "".join(f"# chosen: {line}\n" for line in self.machine_choices)
        for reason, group in groupby(self.settings.items(), key=lambda item: item[1].reason):
            values = {name: setting.value for name, setting in group}
            text += (f"# {reason}\n" if reason else "") + yaml.safe_dump(values, sort_keys=False)
        (folder / RECIPE).write_text(text, encoding="utf-8")
        (folder / FACTS).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Return the recipe of a run, or `None` if the folder holds none."""
        if not (folder / FACTS).is_file():
            return None
        with blame_the_files(f"{folder / FACTS} is damaged"):
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            settings = {name: Setting(**setting) for name, setting in facts.pop("settings").items()}
            return cls(settings, **facts)


def parse_recipe(argv: Sequence[str], program: str = "vit-scratch train") -> tuple[Arguments, Recipe]:
    """Build the arguments from `[recipe] [--flag value ...]`, and the recipe with all that file and flags have set.

    Precedence, lowest first: the dataclasses' defaults, the recipe, the flags. A recipe is a flat YAML mapping from
    names of flags to values: one of this package, such as `cifar10_cpu`, or the path of a file. If the command line
    names none, it is `digits`. `null` in it or on the command line is the default. Messages name the `program`.
    """
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        recipe_path = _recipe_path(argv.pop(0))
    elif any(argument.split("=")[0] == "--data" for argument in argv):
        raise UserError(
            f"--data needs a recipe before it, such as: {program} your_images --data FOLDER. The default recipe fits "
            "the digits only."
        )
    else:
        recipe_path = RECIPES / "digits.yaml"
    given = _read_recipe(recipe_path)

    parser = HfArgumentParser(
        ARGUMENT_TYPES,
        prog=program,
        usage=f"{program} [recipe] [--flag value ...]",
        description="Train a Vision Transformer from scratch. A flag overrides the recipe's value. Without a recipe, "
        "the digits of scikit-learn are learnt. `vit-scratch recipes` lists the recipes.",
        allow_abbrev=False,
        exit_on_error=False,  # an error would print the usage of 140 flags
    )
    _refuse_unknown(given, str(recipe_path), program)
    flags, recipe = _explicit(parser, argv, "the command line"), Recipe()
    # A recipe is a command line: the same types, the same checks.
    recipe_argv = [argument for key, value in given.items() for argument in _as_arguments(key, value)]
    values = _explicit(parser, recipe_argv, str(recipe_path))
    without = DEFAULTS | ViTScratchConfig().to_dict() | values
    changed = [name for name, value in flags.items() if value not in (None, without.get(name))]
    replaced = set().union(*(BELONGS_TO.get(name, ()) for name in changed))
    replaced |= RECIPE_MODEL if is_starting_model(flags.get("model")) else set()
    recipe.left_out = [name for name in given if name in replaced and name not in flags]
    by_time = values.get("max_train_minutes") and "lr_scheduler_kwargs" in values.keys() - flags - {*recipe.left_out}
    if by_time and flags.get("max_train_minutes", 0) is None and not flags.get("streaming"):
        flags["max_train_minutes"] = math.inf  # the recipe's schedule counts in parts of the time
    recipe.add({name: value for name, value in values.items() if name not in recipe.left_out}, "recipe")
    recipe.add(flags, "flag")
    with blame_the_user():  # TrainingArguments checks its values itself
        parsed = parser.parse_dict(recipe.values())
    recipe.settings.pop("resume_from_checkpoint", None)  # the saved recipe starts a run afresh
    unset = {name for name, value in vars(parsed[0]).items() if value is None}  # the model's configuration decides
    recipe.settings = {
        name: recipe.settings[name] for name in DEFAULTS if name in recipe.settings and name not in unset
    }
    return Arguments(*parsed), recipe


def model_config(
    args: ModelArguments, label_names: Sequence[str], start: ViTScratchConfig | None = None
) -> ViTScratchConfig:
    """Return the configuration that the flags describe, based on that of a starting model if there is one."""
    given = {name: as_number(value) for name, value in vars(args).items() if value is not None}
    model = given.pop("model", None)
    fixed = {name: getattr(start, name) for name in given if name in ARCHITECTURE} if start else {}
    if wrong := [name for name, saved in fixed.items() if given[name] != as_number(saved)]:
        listed = ", ".join(f"{name} {given[name]} (saved: {fixed[name]})" for name in wrong)
        raise UserError(f"--model {model} does not fit: {listed}. Leave these out: the saved model has its own.")
    given["id2label"] = dict(enumerate(label_names))
    given["label2id"] = {name: index for index, name in enumerate(label_names)}
    try:
        if start is not None:
            unset = dict.fromkeys(("problem_type", "label_mean", "label_scale"))  # which follow from the labels
            config = ViTScratchConfig.from_dict(start.to_dict() | unset, **given)
            config.validate()
            return config
        return ViTScratchConfig(**given) if model is None else ViTScratchConfig.from_variant(model, **given)
    except (ValueError, TypeError) as error:  # already in our own words
        raise UserError(str(error)) from error


def _recipe_path(name: str) -> Path:
    shipped = {path.stem: path for path in RECIPES.glob("*.yaml")}
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise UserError(f"{name} is neither a recipe nor a YAML file. Recipes: {', '.join(sorted(shipped))}.")
    return path


def _read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe as text: the flags' own types read the values, so that `1e-3` is a number and `no` is a word."""
    with blame_the_files(f"{path}: the recipe cannot be read as YAML"):
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: a recipe must be lines of `key: value`, got {type(recipe).__name__}.")
    return recipe


def _as_arguments(key: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    if isinstance(value, dict):
        value = json.dumps({name: _parsed(text) for name, text in value.items()})
    value = {"": "null", ".inf": "inf"}.get(value, value)
    return [f"--{key}={value}"]


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _explicit(parser: HfArgumentParser, argv: Sequence[str], source: str) -> dict[str, Any]:
    """Return the flags that `argv` sets, with their values; the default for `null`."""
    unset, kept, null = object(), list[str](), list[str]()
    for argument in argv:
        if argument.startswith("--") and argument.endswith("=null"):
            null.append(argument.removesuffix("=null"))
        elif argument == "null" and kept and kept[-1].startswith("--"):
            null.append(kept.pop())
        else:
            kept.append(argument)
    try:
        found, unknown = parser.parse_known_args(kept, Namespace(**dict.fromkeys(DEFAULTS, unset)))
    except ArgumentError as error:
        raise UserError(f"{source}: {str(error).rstrip('.')}. Run {parser.prog} --help for the flags.") from error
    null = [argument.removeprefix("--").replace("-", "_") for argument in null]
    if unknown and not unknown[0].startswith("-"):
        advice = "A recipe comes first, flags begin with --, and a value with spaces needs quotes."
        raise UserError(f"{source}: unexpected {unknown[0]!r}. {advice}")
    given = [argument.removeprefix("--").partition("=")[0] for argument in unknown]
    _refuse_unknown([*null, *given], source, parser.prog)
    defaults = {name: parser.get_default(name) for name in null}
    return {name: value for name, value in vars(found).items() if value is not unset} | defaults


def _refuse_unknown(given: Iterable[str], source: str, program: str) -> None:
    if unknown := [name for name in given if name not in DEFAULTS]:
        text = unknown[0].replace("-", "_")  # perhaps epochs, the end of num_train_epochs
        near = [flag for flag in DEFAULTS if flag.endswith(f"_{text}")] or difflib.get_close_matches(text, DEFAULTS, 1)
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{source}: unknown flag {unknown[0]!r}.{guess} Run {program} --help for the flags.")
