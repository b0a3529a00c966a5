"""Convert saved models of other libraries to ours.

    vit-scratch convert SOURCE DESTINATION   convert a saved model
    vit-scratch convert --verify             measure how far converted models differ

The functions that convert modules in memory, in both directions, can be imported from here too. Each raises a
`UserError` for a module of another class, for a feature that the other side has not, and if timm is missing.
"""

import argparse
import math
import re
from contextlib import AbstractContextManager, suppress
from os.path import expanduser
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from PIL.Image import Resampling
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BaseImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.utils import logging as transformers_logging

from ..data.images import is_local
from ..errors import UserError, blame_the_files, blame_the_user
from ..model.configuration_vit_scratch import POOLINGS, VARIANTS
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchPreTrainedModel
from .bert import BertComposite, from_bert, to_bert
from .names import LoadedModel, as_number, build_from_weights, summarize, to_our_names
from .parity import verify
from .timm import TIMM, from_timm, timm_class, to_timm
from .torchvision import TORCHVISION, from_torchvision, to_torchvision
from .vit import CLASSES, from_vit, to_vit

__all__ = [
    "BertComposite", "LoadedModel", "convert", "from_bert", "from_timm", "from_torchvision", "from_vit", "load",
    "to_bert", "to_timm", "to_torchvision", "to_vit", "verify",
]  # fmt: skip


def load(source: str, **unsaid: Any) -> LoadedModel:
    """Load a saved model of ours, transformers, timm or torchvision as a model of ours.

    Args:
        source: A folder, or a name on the Hub, of a ViTScratch model, a transformers ViT or a timm model; a name of
            timm, for its pretrained weights; or a file of weights of timm's or torchvision's `VisionTransformer`
            (`.safetensors`, `.pth`, `.bin`).
        unsaid: Fields that a file of weights lacks: `num_attention_heads`, known for the published sizes;
            `image_size`, height and width in pixels, if they differ; `pooling`, `"cls"` or `"mean"`.

    Raises:
        UserError: The source cannot be read or converted.
    """
    described: dict[str, Any] | None  # by timm: how images are prepared, and the names of the classes
    if Path(source).is_file():
        ours, assumed, described = _from_file(Path(source), **unsaid)
        kind = "the weights"
    else:
        module = _load_module(source).eval()
        kind, assumed, described = type(module).__name__, "", getattr(module, "pretrained_cfg", None)
        if isinstance(module, ViTScratchPreTrainedModel):
            ours = module
        else:
            ours = from_vit(module) if described is None else from_timm(module)
    label_names = (described or {}).get("label_names")
    if label_names and len(label_names) == ours.config.num_labels:
        ours.config.id2label = dict(enumerate(label_names))
        ours.config.label2id = {name: index for index, name in enumerate(label_names)}
    return LoadedModel(ours, kind, assumed, _image_processor(source, described))


def convert(source: str, destination: str, **unsaid: Any) -> None:
    """Convert a saved model into a folder of a ViTScratch model, and print what was done.

    The destination is a folder that does not exist or is empty. The other arguments are those of `load`.

    Raises:
        UserError: The source cannot be read or converted, or the destination holds something.
    """
    if Path(destination).exists() and (Path(destination).is_file() or any(Path(destination).glob("[!.]*"))):
        raise UserError(f"{destination} exists and is not an empty folder. Choose another destination.")
    is_weights = Path(source).is_file() or Path(source).suffix in (".safetensors", ".pth", ".bin")  # perhaps mistyped
    if any(unsaid.values()) and not is_weights:
        raise UserError(
            f"--num_attention_heads, --image_size and --pooling are for a file of weights, which {source} is not. "
            "Leave them out."
        )
    ours, kind, assumed, image_processor = load(source, **unsaid)
    if kind == type(ours).__name__:
        raise UserError(f"{source} holds {kind}. It is a ViTScratch model already.")
    ours.save_pretrained(destination)
    note = "no image processor is known or fits: save one there before using a pipeline"
    if image_processor is not None:
        image_processor.save_pretrained(destination)
        note = "preprocessor_config.json prepares images"

    config = ours.config
    (height, width), (patch_height, patch_width) = config.image_height_width, config.patch_height_width
    labels = f", {config.num_labels} labels" if isinstance(ours, ViTScratchForImageClassification) else ""
    print(f"Converted {kind} in {source} to {type(ours).__name__} in {destination}:")
    sizes = (
        f"{ours.num_parameters() / 1e6:.2f}M parameters; {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_attention_heads} attention heads; images {height}x{width}, patches "
        f"{patch_height}x{patch_width}{labels}"
    )
    equal = "with random weights its outputs and hidden states equal the source's, in float64"
    for line in (sizes, assumed or equal, note):
        print(f"- {line}")


def _load_module(source: str) -> nn.Module:
    """Return the model that a folder or a name stands for: of ours, transformers or timm."""
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise UserError(f"{source} holds no config.json. Give the folder of a saved model, or a file of weights.")
    elif "/" not in source:
        timm_class(f"{source} is neither a file nor a folder. As a name of timm it")
        return _load_from_timm(source)
    elif is_local(source):
        raise UserError(f"{source} is neither a file, nor a folder, nor a name on the Hub.")
    with _reading(source):
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    if "architecture" in config:  # timm's word
        return _load_from_timm(f"{'local-dir' if Path(source).is_dir() else 'hf-hub'}:{source}")
    classes = {cls.__name__: cls for cls in (*CLASSES, *CLASSES.values())}
    architecture = (config.get("architectures") or ["nothing"])[0]
    if architecture not in classes:
        known = ", ".join(cls.__name__ for cls in CLASSES)
        raise UserError(f"{source} holds {architecture}; it must be one of {known}.")
    with _reading(source):
        module, report = cast(Any, classes[architecture]).from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True
        )
    wrong = {*report["missing_keys"], *report["unexpected_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    if wrong := {name for name in wrong if "pooler." not in name}:
        raise UserError(f"{source} holds other weights than its config.json says: {summarize(sorted(wrong))}.")
    return cast(nn.Module, module)


def _load_from_timm(name: str) -> nn.Module:
    timm_class(name)
    import timm

    with _reading(name):
        return timm.create_model(name, pretrained=True)


def _from_file(
    path: Path, num_attention_heads: int | None = None, image_size: list[int] | None = None, pooling: str | None = None
) -> tuple[ViTScratchPreTrainedModel, str, dict[str, Any]]:
    """Return our model of a file of weights of timm or torchvision, what was assumed, and how images are prepared."""
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
    state = to_our_names(theirs, table, str(path))
    needed = {"embeddings.patch_embeddings.projection.weight": 4, "embeddings.position_embeddings": 3,
              "layers.0.mlp.fc1.weight": 2}  # fmt: skip
    if wrong := [name for name, dims in needed.items() if name not in state or state[name].ndim != dims]:
        raise UserError(f"{path}: the counterpart of {summarize(wrong)} is missing, or has a wrong number of axes.")
    patches = state["embeddings.patch_embeddings.projection.weight"]
    has_cls_token, fc_norm = "embeddings.cls_token" in state, "fc_norm.weight" in theirs
    if num_attention_heads is None:
        num_attention_heads = {width: heads for width, _, heads, _ in VARIANTS.values()}.get(len(patches))
        if num_attention_heads is None:
            raise UserError(
                f"{path} does not say how many attention heads share its hidden size of {len(patches)}: give "
                "--num_attention_heads."
            )
    assumed = ""
    if image_size is None:
        side = math.isqrt(state["embeddings.position_embeddings"].shape[1] - has_cls_token)
        image_size = [side * pixels for pixels in patches.shape[2:]]
        assumed = "square images, "
    if pooling is None:
        pooling = "cls" if has_cls_token and not fc_norm else "mean"
    ours = build_from_weights(
        state,
        str(path),
        image_size=as_number(image_size),
        num_attention_heads=num_attention_heads,
        layer_norm_eps=1e-6,
        pooling=pooling,
        fc_norm=fc_norm,
    )
    assumed = (
        f"assumed, as the file does not say it: {assumed}{num_attention_heads} attention heads, layer_norm_eps 1e-6, "
        f"GELU, pooling {pooling!r}"
    )
    size = (ours.config.num_channels, *ours.config.image_height_width)
    # torchvision's mean and standard deviation, for all of its weights; timm's differ.
    prepared = {"input_size": size, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    return ours, assumed, prepared if table is TORCHVISION else {}


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, out of the wrappings of the usual training scripts."""
    # timm saves its flags, a Namespace, beside the weights.
    with _reading(path), torch.serialization.safe_globals([argparse.Namespace]):
        is_pickle = path.suffix != ".safetensors"
        state: Any = torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
    for wrapping in ("model_ema", "state_dict_ema", "model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapping), dict):
            state = state[wrapping]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{path} holds no weights by name.")
    state.pop("n_averaged", None)  # of torch's AveragedModel
    wrappers = re.compile(r"^((module|_orig_mod|model)\.)+")  # of DDP, torch.compile and Lightning, in any order
    return {wrappers.sub("", name): state[name] for name in state} if all(map(wrappers.match, state)) else state


def _reading(source: object) -> AbstractContextManager[None]:
    return blame_the_files(f"{source} is truncated, not there, or of another kind")


def _image_processor(source: str, prepared: dict[str, Any] | None) -> BaseImageProcessor | None:
    """Return the image processor beside the model, or one that follows timm's description but does not crop."""
    if prepared is None:
        with suppress(OSError, ValueError):
            return transformers.AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    if not prepared or not prepared.get("mean") or prepared["input_size"][0] != 3:  # stock ones make RGB
        return None
    return transformers.ViTImageProcessor(
        size=dict(zip(("height", "width"), prepared["input_size"][1:], strict=True)),
        resample=Resampling[prepared.get("interpolation", "bilinear").upper()],
        image_mean=list(prepared["mean"]),
        image_std=list(prepared["std"]),
        do_convert_rgb=True,
    )


def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="vit-scratch convert", description=__doc__.partition(chr(10))[0])
    parser.add_argument(
        "source", nargs="?", type=expanduser, help="a folder or Hub name of transformers or timm, or a file of weights"
    )
    parser.add_argument("destination", nargs="?", type=expanduser, help="the folder to write")
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
    with blame_the_user():
        unsaid = {name: getattr(args, name) for name in ("num_attention_heads", "image_size", "pooling")}
        convert(args.source, args.destination, **unsaid)
    return 0
