"""Compute and draw what a trained model attends to in an image.

    vit-scratch explain runs/digits a_digit.png another_digit.png --output_dir pictures

Shapes: B images, L layers, H heads, N tokens (the class token, if there is one, then the patches row by row),
rows x cols patches.
"""

import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import ImageClassificationPipeline

from ..data.images import ADVICE, decode_image, denormalize, local_path
from ..errors import UserError
from ..evaluation.figures import new_figure
from ..evaluation.predict import classes_by_number, find_images, load_classifier, model_parser, refuse_other_models
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchPreTrainedModel


@torch.no_grad()
def attention(model: ViTScratchPreTrainedModel, pixel_values: Tensor) -> Tensor:
    """Return the attention weights of every layer and head, for any `attn_implementation`.

    Args:
        model: A ViTScratch model, which is set to evaluation mode.
        pixel_values: (B, C, height, width), normalized, on the model's device.

    Returns:
        (B, L, H, N, N), at least float32. Row i holds the share that token i takes from each token, and sums to 1.
    """
    weights = torch.stack(model.eval()(pixel_values, output_attentions=True, return_dict=True).attentions, dim=1)
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def rollout(attentions: Tensor) -> Tensor:
    """Return the share of each input token in each output token (attention rollout).

    Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928, section 3 and equation 1: the product over the layers of
    the mean over the heads, each averaged with the identity for the residual connection.

    Args:
        attentions: (B, L, H, N, N).

    Returns:
        (B, N, N), whose rows sum to 1.
    """
    mixed = attentions.mean(dim=2)
    identity = torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
    total = identity.expand(len(mixed), -1, -1)
    for layer in mixed.unbind(dim=1):
        total = (layer + identity) / 2 @ total
    return total


def class_attention(
    model: ViTScratchForImageClassification, pixel_values: Tensor, class_ids: Sequence[int] | Tensor | None = None
) -> Tensor:
    """Return the relevance of each patch for a class: attention weighted by the gradient of the class's logit.

    Chefer et al. 2021, https://arxiv.org/abs/2103.15679, equations 5 and 6, without the identity from which the
    relevance starts. Unlike rollout it differs between classes. The gradients of the parameters stay as they are.

    Args:
        model: A classifier, which is set to evaluation mode.
        pixel_values: (B, C, height, width), normalized, on the model's device.
        class_ids: One class id for each image, or one for all; `None` for the predicted classes.

    Returns:
        (B, rows, cols), non-negative, at least float32. It has no unit: compare patches of the same image only.

    Raises:
        RuntimeError: There is another number of class ids, or one that is out of bounds.
    """
    # A compiled graph would compute the attention that it returns and that of the logits apart.
    with torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        # A model with frozen weights has gradients only if its input requires them.
        pixel_values = pixel_values.clone().detach().requires_grad_()
        outputs = model.eval()(pixel_values, output_attentions=True, return_dict=True)
        logits = outputs.logits
        ids = logits.argmax(dim=-1) if class_ids is None else torch.as_tensor(class_ids, device=logits.device)
        # One backward pass serves all images: the logit of one has no gradient in another.
        scores = logits.gather(1, ids.expand(len(logits))[:, None])
        gradients = torch.autograd.grad(scores.sum(), outputs.attentions)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    identity = torch.eye(gradients[0].shape[-1], dtype=dtype, device=logits.device)
    relevance = identity.expand(len(logits), -1, -1)
    for weights, gradient in zip(outputs.attentions, gradients, strict=True):
        weighted = (weights.detach().to(dtype) * gradient.to(dtype)).clamp(min=0).mean(dim=1)
        relevance = relevance + weighted @ relevance
    grid = model.vit.embeddings.patch_embeddings.grid_of(pixel_values)
    return over_patches(relevance - identity, grid, pooling=model.config.pooling)


def over_patches(
    weights: Tensor, grid: tuple[int, int], patch: tuple[int, int] | None = None, *, pooling: str | None = None
) -> Tensor:
    """Return the share that one patch, or the pooled vector of the image, takes from each patch.

    Args:
        weights: (..., N, N), from `attention` or `rollout`.
        grid: Rows and columns of patches, `config.grid_size` for images of the model's size.
        patch: Row and column of the patch that reads, from 0; `None` for the vector that the classifier reads.
        pooling: `config.pooling`, which says what that vector is. `None` means the class token if there is one.

    Returns:
        (..., rows, cols). The share taken from the class token is left out.

    Raises:
        ValueError: The weights have another number of patches.
    """
    num_prefix_tokens = weights.shape[-1] - math.prod(grid)
    if num_prefix_tokens not in (0, 1):
        raise ValueError(
            f"grid {tuple(grid)} does not fit {weights.shape[-1]} tokens. Use the model's config.grid_size."
        )
    if patch is not None:
        row = weights[..., num_prefix_tokens:, :].unflatten(-2, grid)[..., *patch, :]
    elif num_prefix_tokens and pooling != "mean":
        row = weights[..., 0, :]
    else:
        row = weights[..., num_prefix_tokens:, :].mean(dim=-2)
    return row[..., num_prefix_tokens:].unflatten(-1, grid)


@torch.no_grad()
def position_similarity(model: ViTScratchPreTrainedModel) -> Tensor:
    """Return the cosine similarities between the position embeddings of all patches.

    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7, middle.

    Returns:
        (rows, cols, rows, cols), at least float32, from -1 to 1.
    """
    embeddings = cast(Any, model.base_model).embeddings
    grid = embeddings.grid_size
    positions = embeddings.position_embeddings[0, -math.prod(grid) :]
    positions = F.normalize(positions.to(torch.promote_types(positions.dtype, torch.float32)), dim=-1)
    return (positions @ positions.T).unflatten(1, grid).unflatten(0, grid)


@torch.no_grad()
def patch_filters(model: ViTScratchPreTrainedModel, number: int = 28) -> Tensor:
    """Return the principal components of the patch embedding's filters, the largest first.

    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7, left.

    Returns:
        At most (number, C, patch height, patch width), at least float32, each of length 1 with a positive peak.
    """
    weight = cast(Any, model.base_model).embeddings.patch_embeddings.projection.weight
    filters = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    components = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:number]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return (components * largest.sign()).unflatten(1, weight.shape[1:])


@dataclass(frozen=True)
class ImageAttention:
    """What a model attends to in one image, on the CPU."""

    pixels: NDArray[np.uint8]  # (height, width, C), as the model sees them
    predictions: list[dict[str, Any]]  # `label` and `score`, best first; numbers in their order
    grid: tuple[int, int]
    pooling: str  # of the model
    attentions: Tensor  # (L, H, N, N), float16
    rollout: Tensor  # (rows, cols), for the pooled vector
    class_attention: Tensor  # (K, rows, cols), for the first K predictions


def inspect_image(classifier: ImageClassificationPipeline, image: Image.Image, num_classes: int = 1) -> ImageAttention:
    """Compute what a model attends to in an RGB image, with the class attention of the best `num_classes` classes.

    Of a regression, all numbers are predictions, in the order of the model's labels.

    Raises:
        UserError: The model is of another class.
    """
    refuse_other_models(classifier.model)
    model, image_processor = cast(Any, classifier.model), cast(Any, classifier.image_processor)
    inputs = image_processor(images=image, return_tensors="pt").to(model.device, model.dtype)
    pixel_values, pooling = inputs["pixel_values"], model.config.pooling
    grid = model.vit.embeddings.patch_embeddings.grid_of(pixel_values)
    with classes_by_number(model.config) as names:
        are_numbers = model.config.problem_type == "regression"
        predictions = classifier.postprocess(classifier.forward(inputs), top_k=len(names) if are_numbers else 5)
        if are_numbers:  # the order of the labels, not that of their values
            predictions.sort(key=lambda prediction: int(prediction["label"]))
    best = [int(prediction["label"]) for prediction in predictions[:num_classes]]
    attentions = attention(model, pixel_values)
    return ImageAttention(
        pixels=denormalize(pixel_values[0], image_processor),
        predictions=[prediction | {"label": names[int(prediction["label"])]} for prediction in predictions],
        grid=grid,
        pooling=pooling,
        attentions=attentions[0].half().cpu(),
        rollout=over_patches(rollout(attentions)[0], grid, pooling=pooling).cpu(),
        class_attention=class_attention(model, pixel_values.expand(len(best), -1, -1, -1), best).cpu(),
    )


def format_prediction(prediction: dict[str, Any], problem_type: str | None) -> str:
    """Return a class and its confidence, or its value in a regression, as text."""
    return f"{prediction['label']}: {prediction['score']:{'.4g' if problem_type == 'regression' else '.0%'}}"


# Figures. Sizes are in inches; a page is about 6.5 wide.


def _draw_grid(images: NDArray[Any], size: tuple[float, float], title: str, **colors: Any) -> tuple[Figure, Any, Any]:
    """Draw small images (lines, columns, height, width, ...) and return the figure, its axes and the last image."""
    figure = new_figure(*size)
    axes: Any = figure.subplots(*images.shape[:2], squeeze=False)
    for place in np.ndindex(*images.shape[:2]):
        shown = axes[place].imshow(images[place], **colors)
        axes[place].set(xticks=[], yticks=[])
    figure.suptitle(textwrap.fill(title, round(10 * size[0])), fontsize=11)
    return figure, axes, shown


def draw_heads(maps: Tensor, title: str) -> Figure:
    """Draw the maps (L, H, rows, cols) of all heads, one row per layer, on one color scale."""
    num_layers, num_heads, rows, cols = maps.shape
    width = max(4.5, 1.0 + 0.75 * num_heads)
    side = min(1.0, (width - 1.5) / num_heads)
    size = (width, 0.9 + (side + 0.05) * rows / cols * num_layers)
    figure, axes, shown = _draw_grid(maps.cpu().numpy(), size, title, cmap="viridis", vmin=0, vmax=float(maps.max()))
    for head, panel in enumerate(axes[0], 1):
        panel.set_title(f"head {head}" if head == 1 else f"{head}", fontsize=9)
    for layer, panel in enumerate(axes[:, 0], 1):
        panel.set_ylabel(f"layer {layer}" if layer == 1 else f"{layer}", fontsize=9, rotation=0, ha="right")
    figure.colorbar(shown, ax=axes, label="share of the attention", shrink=min(1.0, 3 / num_layers), aspect=15)
    return figure


def draw_over_image(image: NDArray[np.uint8], maps: Mapping[str, Tensor]) -> Figure:
    """Draw an image (height, width, C), and each map (rows, cols) over a grey copy, on its own color scale."""
    height, width = image.shape[:2]
    side = 2.4
    figure = new_figure(side * (1 + len(maps)), side * height / width + 0.9)
    first, *others = figure.subplots(1, 1 + len(maps))
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    first.imshow(image, cmap="gray", vmin=0, vmax=255)
    first.set_title("what the model sees", fontsize=10)
    for panel, (title, values) in zip(others, maps.items(), strict=True):
        panel.imshow(image.mean(axis=-1), cmap="gray", vmin=0, vmax=255)
        shown = panel.imshow(values.cpu().numpy(), cmap="viridis", vmin=0, alpha=0.65, extent=extent)
        panel.set_title(title, fontsize=10)
        bar = figure.colorbar(shown, ax=panel, orientation="horizontal", shrink=0.9, ticks=MaxNLocator(2))
        bar.ax.tick_params(labelsize=7)
    for panel in (first, *others):
        panel.set(xticks=[], yticks=[], anchor="N")  # aligned at the top, although the first has no color scale
    return figure


def draw_position_similarity(similarity: Tensor) -> Figure:
    """Draw similarities (rows, cols, rows, cols): one small map for each patch, or some, at its place."""
    rows, cols = similarity.shape[:2]
    step = math.ceil(max(rows, cols) / 16)  # more maps would be too small
    maps = similarity[::step, ::step].cpu().numpy()
    which = "each patch" if step == 1 else f"one patch in every {step}x{step}"
    title = f"Position embeddings: one map for {which}, at its place"
    figure, axes, shown = _draw_grid(maps, (6.5, 0.7 + 5.4 * rows / cols), title, cmap="cividis", vmin=-1, vmax=1)
    figure.colorbar(shown, ax=axes, label="cosine similarity")
    return figure


def draw_filters(filters: Tensor) -> Figure:
    """Draw filters (number, C, height, width) in full lines of seven, each scaled to its own range; grey is 0."""
    number, channels, height, width = filters.shape
    columns = min(7, number)
    lines = number // columns
    values = filters if channels == 3 else filters.mean(dim=1, keepdim=True)
    scaled = 0.5 + 0.5 * values / values.abs().amax(dim=(1, 2, 3), keepdim=True)
    images = scaled[: lines * columns].movedim(1, -1).unflatten(0, (lines, columns)).cpu().numpy()
    size = (max(3.5, 0.85 * columns), 0.6 + 0.85 * lines * height / width)
    title = "Patch embedding: principal components of its filters"
    return _draw_grid(images, size, title, cmap="gray", vmin=0, vmax=1)[0]


def draw_image(classifier: ImageClassificationPipeline, image: Image.Image) -> dict[str, Figure]:
    """Draw what a ViTScratch model attends to in an RGB image, and return the figures by name."""
    model: Any = classifier.model
    seen = inspect_image(classifier, image, num_classes=2)
    maps = over_patches(seen.attentions.float(), seen.grid, pooling=seen.pooling)
    reader = "the class token" if seen.pooling == "cls" else "the mean of the patches"
    titles = [format_prediction(prediction, model.config.problem_type) for prediction in seen.predictions]
    return {
        "class_attention": draw_over_image(seen.pixels, dict(zip(titles, seen.class_attention, strict=False))),
        "heads": draw_heads(maps, f"Attention: what {reader} takes from each patch"),
        "rollout": draw_over_image(seen.pixels, {"attention rollout": seen.rollout}),
    }


def main(argv: list[str]) -> int:
    """Run `vit-scratch explain`, and return 1 if an image could not be decoded, otherwise 0."""
    parser = model_parser("vit-scratch explain", __doc__)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders, and globs in quotes")
    parser.add_argument("--output_dir", type=local_path, required=True, metavar="DIR", help="folder for the PNG files")
    args = parser.parse_args(argv)
    files = find_images(args.images)
    classifier = load_classifier(args.model, args.device)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    exit_code = 0
    for number, file in enumerate(files, 1):  # two in different folders may have one name
        try:
            image = decode_image({"path": file, "bytes": None}, file)
        except UserError as error:
            print(f"vit-scratch explain: {str(error).removesuffix(ADVICE)}", file=sys.stderr)
            exit_code = 1
            continue
        for name, figure in draw_image(classifier, image).items():
            _save(figure, args.output_dir / f"{number}_{Path(file).stem}_{name}.png")
    model: Any = classifier.model
    _save(draw_position_similarity(position_similarity(model)), args.output_dir / "position_similarity.png")
    _save(draw_filters(patch_filters(model)), args.output_dir / "patch_filters.png")
    return exit_code


def _save(figure: Figure, path: Path) -> None:
    """Write a figure, and print its path."""
    figure.savefig(path, dpi=150)
    print(os.fsencode(path).decode(errors="replace"))  # a name may not be UTF-8
