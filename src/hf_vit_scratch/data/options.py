"""The options of the images, their augmentation and their mixtures, which are also flags of `vit-scratch train`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import UserError

Rule = tuple[str, Callable[[Any], bool]]  # in words, and whether a value keeps to it
BETWEEN: Rule = ("lie between 0 and 1", lambda value: 0 < value < 1)
SOME: Rule = ("lie in (0, 1]", lambda value: 0 < value <= 1)
PROBABILITY: Rule = ("lie in [0, 1]", lambda value: 0 <= value <= 1)
SHARE: Rule = ("lie in [0, 1)", lambda value: 0 <= value < 1)
NOT_NEGATIVE: Rule = ("be 0 or more", lambda value: 0 <= value < float("inf"))
POSITIVE: Rule = ("be a positive number", lambda value: 0 < value < float("inf"))
COUNT: Rule = ("be at least 1", lambda value: value >= 1)
PIXELS: Rule = ("be one or two positive numbers", lambda value: 1 <= len(value) <= 2 and min(value) > 0)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("validation_fraction", "test_fraction", "muon_beta2", "ema_decay"), BETWEEN),
    **dict.fromkeys(("random_resized_crop_scale", "layer_decay", "target_accuracy"), SOME),
    **dict.fromkeys(("initial_image_size_fraction", "mixing_start_fraction", "policy_start_fraction"), PROBABILITY),
    **dict.fromkeys(("augmentation_off_fraction", "horizontal_flip_prob", "random_erasing_prob"), PROBABILITY),
    **dict.fromkeys(("translate", "scale", "label_smoothing", "label_smoothing_factor"), SHARE),
    **dict.fromkeys(("mixup_alpha", "cutmix_alpha", "muon_learning_rate", "num_workers"), NOT_NEGATIVE),
    **dict.fromkeys(("initial_image_size", "image_size", "patch_size"), PIXELS),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "randaugment_num_ops", "early_stopping_patience"), COUNT),
    **dict.fromkeys(("top_k", "batch_size"), COUNT),
    "mixup_prob": PROBABILITY,
    "num_train_epochs": POSITIVE,
    **dict.fromkeys(("data", "label_separator"), ("not be empty", bool)),
    "max_steps": ("be at least 1, or -1 for none", lambda value: value == -1 or value >= 1),
    "max_train_minutes": ("be above 0", lambda value: value > 0),
    "rotation_degrees": ("lie in [0, 180]", lambda value: 0 <= value <= 180),
    "randaugment_magnitude": ("lie in [0, 30]", lambda value: 0 <= value <= 30),
    "eval_tta": ("be flip, or left out", lambda value: value == "flip"),
    "freeze_layers": ("be a number of layers or all", lambda value: value == "all" or str(value).isdecimal()),
}


def flag(default: Any, help: str) -> Any:
    """Return a field of a dataclass that `HfArgumentParser` makes a flag with a help text."""
    return field(default=default, metadata={"help": help})


def check_ranges(options: Any) -> None:
    """Refuse values that do not keep to `RULES`. `None` is left alone."""
    for name, (rule, is_allowed) in RULES.items():
        if (value := getattr(options, name, None)) is not None and not is_allowed(value):
            raise UserError(f"{name} must {rule}, got {value!r}.")


class Options:
    """Options that keep to their choices and to `RULES`; a `UserError` names one that does not."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():  # `HfArgumentParser` overwrites the types of the fields
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise UserError(f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(self, name)!r}.")
        check_ranges(self)


@dataclass(kw_only=True)
class DataArguments(Options):
    """Where the images come from.

    A name is tried as `"digits"`, a folder, a table, a parquet file and a dataset on the Hub, in this order. With
    `corrupt_images="raise"`, an image that is missing or cannot be decoded ends the run, at its start if near
    duplicates are looked for; with `"skip"`, every image is decoded once at the start. Do not follow the links of a
    stranger: they could take in your own images.
    """

    data: str = flag(
        "digits", "digits, a folder of class folders, a table of paths, parquet files, or a dataset's name on the Hub."
    )
    streaming: bool = flag(False, "Read training images while training; for data too large to download.")
    data_config: str | None = flag(None, "Configuration of a dataset on the Hub that has several.")
    image_column: str | None = flag(None, "Column of the images, or of their paths; found by its type.")
    label_column: list[str] | None = flag(None, "Column or columns of the labels; found by its type or name.")
    label_separator: str | None = flag(None, "What separates several labels in one cell of a table, such as ';'.")
    train_split: str = flag("train", "Split to train on.")
    validation_split: str | None = flag(None, "Split to choose the best model; 'validation', else cut from train.")
    test_split: str | None = flag(None, "Split for the final report; 'test', else cut from train.")
    validation_fraction: float = flag(0.1, "Share of train that is cut for validation.")
    test_fraction: float = flag(0.1, "Share of train that is cut for testing.")
    corrupt_images: Literal["raise", "skip"] = flag(
        "raise", "What to do with images that cannot be decoded: raise, or skip and name them."
    )
    group_by: str | None = flag(
        None,
        "Keep images of one group in one split. The group is a column, the name of the folder 1, 2, ... levels above "
        "the file, or what the first group of a regular expression finds in the path.",
    )
    near_duplicates: Literal["keep_together", "drop", "ignore"] = flag(
        "keep_together",
        "What to do with near duplicates (resized, compressed or mirrored copies): keep them in one split, drop all "
        "but one, or ignore them.",
    )
    follow_links: bool = flag(False, "Let links in a folder, and paths in tables, lead out of it.")


@dataclass(kw_only=True)
class AugmentationArguments(Options):
    """The random changes to training images.

    Sources, by the order of the fields: Tan and Le 2021, https://arxiv.org/abs/2104.00298, section 4 (smaller images
    and less regularization first); Ge et al. 2021, https://arxiv.org/abs/2107.08430, section 2.1 (no augmentation at
    the end); Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6 (random resized crop); Cubuk et al. 2019,
    https://arxiv.org/abs/1909.13719 (RandAugment); Mueller and Hutter 2021, https://arxiv.org/abs/2103.10158
    (TrivialAugment); Zhong et al. 2017, https://arxiv.org/abs/1708.04896 (random erasing).
    """

    initial_image_size: list[int] | None = flag(None, "Pixels in the first part of training: one number or two.")
    initial_image_size_fraction: float = flag(0.0, "Share of training that the first part lasts.")
    mixing_start_fraction: float = flag(0.0, "Share of training before images are mixed.")
    policy_start_fraction: float = flag(0.0, "Share of training before auto_augment and random erasing.")
    augmentation_off_fraction: float = flag(0.0, "Share of training, at its end, without augmentation and mixing.")
    random_resized_crop_scale: float | None = flag(None, "Least share of the area that a random resized crop keeps.")
    crop_padding: int = flag(0, "Padding in pixels before a random crop.")
    horizontal_flip_prob: float = flag(0.0, "Probability of a mirror image.")
    rotation_degrees: float = flag(0.0, "Largest rotation to either side.")
    translate: float = flag(0.0, "Largest shift, as a share of height and width.")
    scale: float = flag(0.0, "Largest relative change of size.")
    auto_augment: Literal["none", "randaugment", "trivialaugment"] = flag(
        "none", "A policy of random operations: none, randaugment or trivialaugment."
    )
    randaugment_num_ops: int = flag(2, "Operations that RandAugment draws per image.")
    randaugment_magnitude: int = flag(9, "Strength of RandAugment, 0 to 30.")
    random_erasing_prob: float = flag(0.0, "Probability that a random rectangle turns grey.")


@dataclass(kw_only=True)
class MixingArguments(Options):
    """Mixtures of two training images, and the weights of classes.

    Sources: MixUp (Zhang et al. 2017, https://arxiv.org/abs/1710.09412, equation 1) and CutMix (Yun et al. 2019,
    https://arxiv.org/abs/1905.04899, equation 1).
    """

    mixup_alpha: float = flag(0.0, "MixUp with shares from Beta(alpha, alpha); 0 for none.")
    cutmix_alpha: float = flag(0.0, "CutMix with areas from Beta(alpha, alpha); 0 for none.")
    mixup_prob: float = flag(1.0, "Probability that an image is mixed, by MixUp or CutMix.")
    class_weighting: Literal["none", "balanced"] = flag(
        "none", "Weights of the classes in the loss; balanced: by the inverse of their images."
    )
