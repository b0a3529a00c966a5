"""Saved models of the other Vision Transformers, made ours.

    vit-scratch convert SOURCE DESTINATION   convert a saved model
    vit-scratch convert --verify             measure how far converted models differ

The functions that convert modules in memory, in both directions, are those of `hf_vit_scratch.conversion.weights`.
"""

import argparse
import math
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from PIL.Image import Resampling
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from ..errors import UserError, blame_the_user
from ..model.configuration_vit_scratch import POOLINGS, VARIANTS, ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel, ViTScratchPreTrainedModel
from .bert import BertComposite, from_bert, to_bert
from .checks import refusing, shape_differences, simplest, some
from .names import to_our_names, with_base_prefix
from .parity import encoder_layers, largest_differences, observe, verify
from .timm import TIMM, from_timm, timm_class, to_timm
from .torchvision import TORCHVISION, from_torchvision, to_torchvision
from .vit import from_vit, to_vit

__all__ = [
    "BertComposite", "convert", "from_bert", "from_timm", "from_torchvision", "from_vit", "to_bert", "to_timm",
    "to_torchvision", "to_vit", "verify",
]  # fmt: skip


def convert(
    source: str,
    destination: str,
    num_attention_heads: int | None = None,
    image_size: list[int] | None = None,
    pooling: str | None = None,
) -> None:
    """Convert a saved model into a folder of ours, and print what was done.

    Args:
        source: A folder, or a name on the Hub, of a transformers ViT or a timm model; or a file of weights of timm's
            or torchvision's `VisionTransformer` (`.safetensors`, `.pth`, `.bin`).
        destination: A folder that does not exist or is empty.
        num_attention_heads: Number of heads, which a file of weights does not say. Known for the published sizes.
        image_size: Height and width in pixels, for a file of weights of images that are not square.
        pooling: `"cls"` or `"mean"`, for a file of weights.

    Raises:
        UserError: The source cannot be read or converted, or the destination holds something.
    """
    if Path(destination).exists() and (Path(destination).is_file() or any(Path(destination).iterdir())):
        raise UserError(f"{destination} exists and is not an empty folder. Choose another destination.")
    notes: list[str] = []
    if image_size is not None and len(image_size) not in (1, 2):
        raise UserError(f"--image_size takes one number or two, got {len(image_size)}.")
    if not Path(source).is_file() and (num_attention_heads or image_size or pooling):
        raise UserError(f"{source} is no file of weights, and says itself what only such a file leaves open.")
    if Path(source).is_file():
        kind, ours = "the weights", _from_file(Path(source), num_attention_heads, image_size, pooling, notes)
        notes.append("no image processor was written, as the file does not say how images were prepared")
    else:
        module = _module_from_folder(source).eval()
        kind = type(module).__name__
        ours = from_timm(module) if hasattr(module, "pretrained_cfg") else from_vit(module)
        label_names = getattr(module, "pretrained_cfg", {}).get("label_names")
        if label_names and len(label_names) == ours.config.num_labels:
            ours.config.id2label = dict(enumerate(label_names))
            ours.config.label2id = {name: index for index, name in enumerate(label_names)}
        notes.append(_largest_differences(module, ours))
    try:
        ours.save_pretrained(destination)
        if not Path(source).is_file():
            notes.append(_save_image_processor(source, module, destination))
    except OSError as error:
        raise UserError(f"{destination} cannot be written: {error}.") from error

    config = ours.config
    height, width = config.image_height_width
    patch_height, patch_width = config.patch_height_width
    labels = f", {config.num_labels} labels" if isinstance(ours, ViTScratchForImageClassification) else ""
    print(f"Converted {kind} in {source} to {type(ours).__name__} in {destination}:")
    print(
        f"- {ours.num_parameters() / 1e6:.2f}M parameters; {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_attention_heads} attention heads; images {height}x{width}, patches "
        f"{patch_height}x{patch_width}{labels}"
    )
    for note in notes:
        print(f"- {note}")


def _largest_differences(module: nn.Module, ours: ViTScratchPreTrainedModel) -> str:
    parameter, config = next(ours.parameters()), ours.config
    pixels = torch.randn(2, config.num_channels, *config.image_height_width).to(parameter)
    with torch.no_grad():
        theirs, own = (observe(model, encoder_layers(model), pixels) for model in (module, ours))
        if isinstance(ours, ViTScratchModel) and "logits" in theirs:  # timm without a head: pooled, or all tokens
            own["logits"] = ours(pixels).pooler_output if theirs["logits"].ndim == 2 else own["last_hidden_state"]
    measured = sorted(largest_differences(theirs, own).items(), reverse=True)
    kinds = ", ".join(f"{kind} {difference:.1e}" for kind, difference in measured)
    return f"largest differences on random images, in {str(pixels.dtype).removeprefix('torch.')}: {kinds}"


def _module_from_folder(source: str) -> nn.Module:
    """The model that is saved in a folder, or on the Hub, by transformers or timm."""
    import transformers

    if not Path(source).is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"{source} is no file, no folder, and no name on the Hub.")
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(f"{source} holds no config.json. Give the folder of a saved model, or a file of weights.")
    with _reading(source):
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    if "architecture" in config:  # timm's word
        timm_class(source)
        import timm

        with _reading(source):
            return timm.create_model(f"{'local-dir' if Path(source).is_dir() else 'hf-hub'}:{source}", pretrained=True)
    model_type = config.get("model_type")
    if model_type != "vit":
        hints = {
            "vit_scratch": " It is a model of ours already.",
            "bert": " A BertModel has no patch embedding: use hf_vit_scratch.conversion.convert.from_bert.",
            "deit": " A DeiTModel has a distillation token, which we have not.",
        }
        raise UserError(
            f"{source} holds a model of type {model_type!r}; a ViT of transformers has 'vit'."
            + hints.get(cast(str, model_type), "")
        )
    architectures = config.get("architectures") or ["ViTModel"]
    known = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")
    if len(architectures) != 1 or architectures[0] not in known:
        raise UserError(f"{source} holds {architectures}; it must be one of {', '.join(known)}.")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what is missing or of another shape is an error here, and one line
    try:
        with _reading(source):
            module, report = getattr(transformers, architectures[0]).from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True
            )
    finally:
        transformers.logging.set_verbosity(verbosity)
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    wrong += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
    wrong += [
        f"{name} is {tuple(was)}, not {tuple(should)}" for name, was, should in sorted(report["mismatched_keys"])
    ]
    if wrong := [text for text in wrong if "pooler." not in text]:
        raise UserError(f"{source} holds other weights than its config.json says: {some(wrong)}.")
    return cast(nn.Module, module)


def _from_file(
    path: Path,
    num_attention_heads: int | None,
    image_size: list[int] | None,
    pooling: str | None,
    notes: list[str],
) -> ViTScratchPreTrainedModel:
    """Our model from a file of weights of timm's or torchvision's; its sizes are read off the shapes."""
    theirs = _read_weights(path)
    if "patch_embed.proj.weight" in theirs:
        table = TIMM
    elif "conv_proj.weight" in theirs:
        table = TORCHVISION
    else:
        raise UserError(
            f"{path} holds no Vision Transformer of timm (patch_embed.proj.weight) or torchvision (conv_proj.weight); "
            f"its first weight is {next(iter(theirs), 'missing')}."
        )
    try:
        state = to_our_names(theirs, table)
        patches, positions = (
            state[f"embeddings.{name}"] for name in ("patch_embeddings.projection.weight", "position_embeddings")
        )
        intermediate_size = len(state["layers.0.mlp.fc1.weight"])
    except KeyError as error:
        what = "an unknown" if error.args[0] in theirs else "no"
        raise UserError(f"{path} is no plain Vision Transformer: it has {what} {error.args[0]}.") from None
    except ValueError:
        raise UserError(f"{path} is no plain Vision Transformer: its qkv cannot be divided by three.") from None
    if patches.ndim != 4 or positions.ndim != 3:
        raise UserError(
            f"{path} is no plain Vision Transformer: its patches are {tuple(patches.shape)}, its positions "
            f"{tuple(positions.shape)}."
        )
    hidden_size, num_channels, patch_height, patch_width = patches.shape
    num_positions = positions.shape[1]
    num_hidden_layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    has_cls_token, fc_norm = "embeddings.cls_token" in state, "fc_norm.weight" in theirs

    if num_attention_heads is None:
        known = {(width, depth, mlp): heads for width, depth, heads, mlp in VARIANTS.values()}
        num_attention_heads = known.get((hidden_size, num_hidden_layers, intermediate_size))
        if num_attention_heads is None:
            raise UserError(
                f"{path} does not say how many attention heads share its hidden size of {hidden_size}: give "
                "--num_attention_heads."
            )
    assumed = ""
    if image_size is None:
        side = math.isqrt(num_positions - has_cls_token)
        image_size = [side * patch_height, side * patch_width]
        assumed = "square images, "
    if pooling is None:
        pooling = "cls" if has_cls_token and not fc_norm else "mean"
    notes.append(
        f"assumed, as the file does not say it: {assumed}{num_attention_heads} attention heads, layer_norm_eps 1e-6, "
        f"GELU, pooling {pooling!r}"
    )
    fields: dict[str, Any] = {}
    if "classifier.weight" in state:
        fields["num_labels"] = len(state["classifier.weight"])
    if "pre_logits.0.weight" in state:
        fields |= {"classifier_hidden_size": len(state["pre_logits.0.weight"]), "classifier_act": "tanh"}
    with refusing(str(path)):
        config = ViTScratchConfig(
            image_size=simplest(image_size * 2 if len(image_size) == 1 else image_size),
            patch_size=simplest((patch_height, patch_width)),
            num_channels=num_channels,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            qkv_bias="layers.0.attention.q_proj.bias" in state,
            layer_norm_eps=1e-6,
            norm_first=True,
            pooling=pooling,
            use_cls_token=has_cls_token,
            fc_norm=fc_norm,
            **fields,
        )
        ours = ViTScratchForImageClassification(config) if "num_labels" in fields else ViTScratchModel(config)
    state = with_base_prefix(state) if "num_labels" in fields else state
    if found := shape_differences(state, ours.state_dict()):
        raise UserError(f"{path} is no plain Vision Transformer: {some(found)}.")
    ours.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return ours


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, out of the wrappings of the usual training scripts."""
    with _reading(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the flags that timm saves beside the weights
            state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapping in ("model_ema", "state_dict_ema", "model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapping), dict):
            state = state[wrapping]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{path} holds no weights by name.")
    for prefix in ("module.", "_orig_mod.", "model."):  # of DDP, torch.compile and Lightning
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


@contextmanager
def _reading(source: object) -> Iterator[None]:
    """One sentence for whatever the libraries raise when a file is truncated, missing, or of another kind."""
    try:
        with blame_the_user():
            yield
    except (UserError, SafetensorError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
        raise UserError(f"{source} is truncated, not there, or of another kind: {reason}.") from error


def _save_image_processor(source: str, module: nn.Module, destination: str) -> str:
    """Write `preprocessor_config.json` where it is known how images were prepared; return what was done."""
    from transformers import AutoImageProcessor, ViTImageProcessor

    prepared = cast(dict[str, Any], getattr(module, "pretrained_cfg", None))
    if prepared is None:
        try:
            AutoImageProcessor.from_pretrained(source).save_pretrained(destination)
        except (OSError, ValueError):
            return "no image processor was found beside the model: save one before using it in a pipeline"
        return "its image processor was copied"
    channels, height, width = prepared["input_size"]
    if channels != 3 or not prepared.get("mean"):
        return "no image processor was written: stock ones make RGB, and these images are something else"
    mean, std = list(prepared["mean"]), list(prepared["std"])
    ViTImageProcessor(
        size={"height": height, "width": width},
        resample=Resampling[prepared.get("interpolation", "bilinear").upper()],
        image_mean=mean,
        image_std=std,
        do_convert_rgb=True,
    ).save_pretrained(destination)
    crop = f"; timm crops to {prepared['crop_pct']:g} of a larger resize, this one does not" * (
        prepared.get("crop_pct", 1) != 1
    )
    return f"an image processor was written: {height}x{width} pixels, mean {mean}, std {std}{crop}"


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vit-scratch convert", description=__doc__.partition(chr(10))[0])
    parser.add_argument("source", nargs="?", help="a folder or Hub name of transformers or timm, or a file of weights")
    parser.add_argument("destination", nargs="?", help="the folder to write")
    parser.add_argument("--num_attention_heads", type=int, help="for a file of weights, which does not say it")
    parser.add_argument("--image_size", type=int, nargs="+", help="for a file of weights: pixels, if not square")
    parser.add_argument("--pooling", choices=POOLINGS, help="for a file of weights; cls where it has a class token")
    parser.add_argument("--verify", action="store_true", help="measure the differences instead, and print the table")
    args = parser.parse_args(argv)
    if args.verify:
        return 0 if verify() else 1
    if args.destination is None:
        parser.error("give SOURCE and DESTINATION, or --verify")
    transformers_logging.disable_progress_bar()
    try:
        convert(args.source, args.destination, args.num_attention_heads, args.image_size, args.pooling)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
