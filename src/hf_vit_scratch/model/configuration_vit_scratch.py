"""The numbers that define a Vision Transformer, and the errors for impossible ones.

Field names follow transformers' `ViTConfig`; `norm_first` is torch's word (`torch.nn.TransformerEncoderLayer`).
"""

import difflib
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin

# hidden_size, num_hidden_layers, num_attention_heads, intermediate_size.
# Ti, S: Touvron et al. 2021 (https://arxiv.org/abs/2012.12877), table 1; B, L, H: Dosovitskiy et al. 2021
# (https://arxiv.org/abs/2010.11929), table 1.
VARIANTS = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
}
VARIANT_NAME = re.compile(rf"({'|'.join(VARIANTS)})/([1-9]\d*)")  # such as S/16
POSITION_EMBEDDING_TYPES = ("learned", "sincos2d", "rope2d")
POOLINGS = ("cls", "mean")
# What the code that is saved beside weights holds for transformers' auto classes.
AUTO_MAP = {
    "AutoConfig": "configuration_vit_scratch.ViTScratchConfig",
    "AutoModel": "modeling_vit_scratch.ViTScratchModel",
    "AutoModelForImageClassification": "modeling_vit_scratch.ViTScratchForImageClassification",
    "AutoModelForMaskedImageModeling": "modeling_vit_scratch.ViTScratchForMaskedImageModeling",
    "AutoBackbone": "modeling_vit_scratch.ViTScratchBackbone",
}
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


class ViTScratchConfig(BackboneConfigMixin, PreTrainedConfig):
    """The configuration of every `ViTScratch...` model. The defaults give ViT-B/16 at 224 pixels, BERT-style.

    Args:
        image_size: Height and width of the images, in pixels: one number for both, or `[height, width]`.
        patch_size: Height and width of a patch, in pixels; must divide `image_size`.
        num_channels: Channels of an image; 3 for RGB.
        hidden_size: Width of a token.
        num_hidden_layers: Number of encoder layers.
        num_attention_heads: Number of attention heads; must divide `hidden_size`.
        intermediate_size: Width of the hidden layer of the MLP.
        hidden_act: Activation of the MLP, a name that `transformers.activations.ACT2FN` knows.
        qkv_bias: Whether the query, key and value projections have a bias.
        layer_norm_eps: Added to the variance by every norm.
        initializer_range: Standard deviation of the truncated normal from which weights are drawn.
        patch_initializer_range: The same for the patch embedding alone; `None` for `1 / sqrt(pixels of a patch)`,
            counted over all channels, as in the code of Dosovitskiy et al. 2021 (LeCun normal), so that pixels of unit
            variance give tokens of unit variance. With `initializer_range`, tokens of small patches would start close
            to zero.
        norm_first: `False` for the BERT style (post-LN: each residual sum is normalized, and so are the embeddings);
            `True` for the ViT style (pre-LN: each branch's input is normalized, and the output once at the end).
        hidden_dropout_prob: Dropout of the embeddings and of each residual branch.
        attention_probs_dropout_prob: Dropout of the attention probabilities.
        drop_path_rate: Stochastic depth (Huang et al. 2016, https://arxiv.org/abs/1603.09382): the probability that
            each of the last layer's branches is skipped, per image. It grows linearly from 0 in the first layer.
        position_embedding_type: `"learned"`; `"sincos2d"`, fixed sines and cosines; or `"rope2d"`, learned positions
            and, beside them, axial rotary positions on queries and keys.
        qk_norm: Whether queries and keys are RMS-normalized per head.
        pooling: Vector that the classifier reads: `"cls"`, the class token, or `"mean"`, the mean of the patch tokens.
        use_cls_token: Whether there is a class token; `None` for exactly where `pooling` reads it. With mean pooling
            it takes part in attention only, as in timm's `global_pool="avg"` and in MAE.
        fc_norm: Whether the final LayerNorm of pre-LN comes after the pooling instead of before it; timm's word.
        classifier_hidden_size: Width of a hidden layer before the classifier; `None` for one linear layer.
        classifier_act: Activation of that hidden layer.
        is_causal: Whether a token attends only to itself and to earlier ones (row by row).
        label_mean: Mean of each number of a regression over the training images.
        label_scale: Its standard deviation, likewise. The classifier learns `(label - mean) / scale`, and the model
            answers in the labels' own units.
        temperature: Number by which the classifier was divided after training, so that its scores are calibrated (Guo
            et al. 2017, https://arxiv.org/abs/1706.04599). The saved weights are already divided by it.
        out_features: The stages whose feature maps `ViTScratchBackbone` gives, by name: `"stem"`, the embeddings, and
            `"stage1"`, `"stage2"`, ..., the layers. `None` for the last one. Not a field of the class, but an argument
            and an attribute, as in transformers.
        out_indices: The same by number, the stem being 0.

    Raises:
        ValueError: A field has an impossible value, or its name is a misspelling of a known one.

    Example:
        >>> ViTScratchConfig(image_size=[32, 64], patch_size=8, hidden_size=192, num_attention_heads=3).grid_size
        (4, 8)
    """

    model_type = "vit_scratch"
    _auto_class = "AutoConfig"  # so the file of a subclass is saved, too
    keys_to_ignore_at_inference = ["hidden_states", "attentions"]  # the Trainer would gather them in an evaluation

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    patch_initializer_range: float | None = None
    norm_first: bool = False
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    drop_path_rate: float = 0.0
    position_embedding_type: str = "learned"
    qk_norm: bool = False
    pooling: str = "cls"
    use_cls_token: bool | None = None
    fc_norm: bool = False
    classifier_hidden_size: int | None = None
    classifier_act: str = "gelu"
    is_causal: bool = False
    label_mean: list[float] | None = None
    label_scale: list[float] | None = None
    temperature: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # transformers keeps unknown names as attributes, and its own loading needs that; a near miss of a field,
        # though, is a misspelling that would otherwise be ignored in silence.
        known = [*(f.name for f in fields(self)), "num_labels", "attn_implementation", "out_features", "out_indices"]
        # A saved configuration, which has a version, may hold attributes that were set on it later.
        for name in sorted(kwargs.keys() - known) if self.transformers_version is None else ():
            words = {*name.split("_")}  # timm's num_heads has two of those of num_attention_heads
            near = [field for field in known if len(words) > 1 and words < {*field.split("_")}]
            if near := near or difflib.get_close_matches(name, known, n=1, cutoff=0.8):
                raise ValueError(f"{type(self).__name__} has no field {name!r}. Did you mean {near[0]!r}?")
        stages = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if kwargs.get("num_labels") is None:
            kwargs.pop("num_labels", None)
        else:  # before transformers gives each a name
            NUM_LABELS.check("num_labels", kwargs["num_labels"])
        super().__post_init__(**kwargs)
        self.validate()
        self._out_features = self._out_indices = None
        if stages != {"out_features": None, "out_indices": None}:
            self.set_output_features_output_indices(**stages)

    @classmethod
    def from_variant(cls, variant: str, **overrides: Any) -> Self:
        """Build the configuration of a published size, such as `"S/16"`: size Ti, S, B, L or H, then the patch size.

        The name gives the sizes and pre-LN, as published. Fields override both.

        Raises:
            ValueError: The name is not of that form.

        Example:
            >>> ViTScratchConfig.from_variant("Ti/4", image_size=32).hidden_size
            192
        """
        match = VARIANT_NAME.fullmatch(variant)
        if match is None:
            raise ValueError(
                f"variant must be one of {', '.join(VARIANTS)}, a slash and the patch size in pixels, such as 'S/16'; "
                f"got {variant!r}."
            )
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        sizes = dict(zip(names, VARIANTS[match[1]], strict=True))
        return cls(**{"patch_size": int(match[2]), "norm_first": True} | sizes | overrides)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration as transformers does, and the code, so that the model loads without this package.

        It then loads with `trust_remote_code=True`; where the package is imported, without.
        """
        # Not by the models' `_auto_class`: it writes the entry of one class only, and of a model that is wrapped by
        # FSDP transformers would save the code of the wrapper.
        folder, entries = Path(save_directory), dict(getattr(self, "auto_map", None) or {})
        written = {name: path for name, path in entries.items() if (folder / f"{path.partition('.')[0]}.py").is_file()}
        self.auto_map = AUTO_MAP | written  # of a subclass, whose file transformers has saved
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("configuration_vit_scratch.py", "modeling_vit_scratch.py"):
            if (code := Path(__file__).with_name(name)).is_file():  # a configuration may have come from the Hub alone
                shutil.copyfile(code, folder / name)
        super().save_pretrained(save_directory)
        if push_to_hub:  # transformers' own `push_to_hub=True` would leave out the file that is copied above
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @property
    def image_height_width(self) -> tuple[int, int]:
        """`image_size` as (height, width), pixels."""
        return _pair(self.image_size)

    @property
    def patch_height_width(self) -> tuple[int, int]:
        """`patch_size` as (height, width), pixels."""
        return _pair(self.patch_size)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Number of patches along the height and along the width of an image of `image_size`."""
        (height, width), (patch_height, patch_width) = self.image_height_width, self.patch_height_width
        return height // patch_height, width // patch_width

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: 1 with a class token, else 0."""
        return int(self.pooling == "cls" if self.use_cls_token is None else self.use_cls_token)

    @property
    def stage_names(self) -> list[str]:
        """The names of a backbone's stages: the embeddings, and each layer."""
        return ["stem", *(f"stage{number}" for number in range(1, self.num_hidden_layers + 1))]

    # What was not chosen is the last stage, also when the number of layers changes later.
    @BackboneConfigMixin.out_features.getter  # type: ignore[attr-defined]
    def out_features(self) -> list[str]:
        """The names of the stages whose feature maps a backbone gives."""
        return self._out_features or self.stage_names[-1:]

    @BackboneConfigMixin.out_indices.getter  # type: ignore[attr-defined]
    def out_indices(self) -> list[int]:
        """The numbers of these stages."""
        return self._out_indices or [self.num_hidden_layers]

    def validate(self) -> None:
        """Check every field; called at construction, by the model, and by `save_pretrained`.

        Raises:
            ValueError: A field, or a combination of fields, is impossible.
        """
        for name, rule in RULES.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value is not None or default is not None:  # None is accepted where it is the default
                rule.check(name, value)
        if self.pooling == "cls" and self.use_cls_token is False:
            raise ValueError("use_cls_token=False needs pooling='mean': there is no class token to read.")
        if self.fc_norm and not self.norm_first:
            raise ValueError("fc_norm=True needs norm_first=True: post-LN has no final LayerNorm to move.")
        axes = zip(("height", "width"), self.image_height_width, self.patch_height_width, strict=True)
        for axis, image, patch in axes:
            if image % patch != 0:
                raise ValueError(
                    f"image_size ({axis} {image}) must be divisible by patch_size ({axis} {patch}). "
                    f"Use image size {max(1, round(image / patch)) * patch}."
                )
        hidden_size, num_heads = self.hidden_size, self.num_attention_heads
        if hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size ({hidden_size}) must be divisible by num_attention_heads ({num_heads}).")
        if self.position_embedding_type == "sincos2d" and (hidden_size % 4 != 0 or hidden_size < 8):
            raise ValueError(
                "position_embedding_type='sincos2d' needs a hidden_size that is a multiple of 4 and at least 8 (sines "
                f"and cosines for each of two axes), got {hidden_size}."
            )
        if self.position_embedding_type == "rope2d" and hidden_size // num_heads % 4 != 0:
            raise ValueError(
                "position_embedding_type='rope2d' needs hidden_size / num_attention_heads to be a multiple of 4 (two "
                f"halves for each of two axes), got {hidden_size} / {num_heads} = {hidden_size // num_heads}."
            )


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class Rule(NamedTuple):
    """What must hold for the value of a field, and how to say it."""

    holds: Callable[[Any], bool]
    in_words: str

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError that names the field, unless the rule holds."""
        if not self.holds(value):
            raise ValueError(f"{name} must be {self.in_words}, got {value!r}.")


def _number(holds: Callable[[Any], bool], in_words: str, kind: Any = int | float) -> Rule:
    return Rule(lambda value: isinstance(value, kind) and not isinstance(value, bool) and holds(value), in_words)


def _list_of(rule: Rule, text: str) -> Rule:
    return Rule(lambda value: isinstance(value, list) and all(map(rule.holds, value)), text)


def _one_of(choices: Sequence[str]) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}")


def _is_size(size: Any) -> bool:
    return COUNT.holds(size) or (isinstance(size, list | tuple) and len(size) == 2 and all(map(COUNT.holds, size)))


COUNT = _number(lambda value: value >= 1, "an integer of at least 1", int)
NUM_LABELS = _number(lambda value: value >= 0, "an integer of at least 0", int)
SIZE = Rule(_is_size, "an integer or a [height, width] pair of integers, in pixels, of at least 1")
POSITIVE = _number(lambda number: 0 < number < math.inf, "a positive and finite number")
PROBABILITY = _number(lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
FLAG = Rule(lambda value: isinstance(value, bool), "True or False")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("image_size", "patch_size"), SIZE),
    **dict.fromkeys(("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"), COUNT),
    **dict.fromkeys(("intermediate_size", "classifier_hidden_size"), COUNT),
    **dict.fromkeys(("layer_norm_eps", "initializer_range", "patch_initializer_range", "temperature"), POSITIVE),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"), PROBABILITY),
    **dict.fromkeys(("qkv_bias", "norm_first", "qk_norm", "is_causal", "fc_norm", "use_cls_token"), FLAG),
    **dict.fromkeys(("hidden_act", "classifier_act"), _one_of(tuple(ACT2FN))),
    "label_mean": _list_of(_number(math.isfinite, ""), "a list of finite numbers"),
    "label_scale": _list_of(POSITIVE, "a list of positive numbers"),
    "position_embedding_type": _one_of(POSITION_EMBEDDING_TYPES),
    "pooling": _one_of(POOLINGS),
    "problem_type": _one_of(PROBLEM_TYPES),
}
