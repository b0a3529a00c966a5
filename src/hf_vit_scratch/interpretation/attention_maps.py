"""What a trained model looks at, as arrays and as figures.

    vit-scratch explain runs/digits a_digit.png --output_dir pictures

Shapes: B images, L layers, H heads, N tokens (the class token, if any, and then the patches, row by row), rows x cols
patches.
"""

import argparse
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.images import decode_image
from ..errors import UserError
from ..evaluation.predict import load_classifier
from ..model.modeling_vit_scratch import (
    ViTScratchEmbeddings,
    ViTScratchForImageClassification,
    ViTScratchPreTrainedModel,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRAM = "vit-scratch explain"
MAX_FILTERS = 28  # as many as the paper shows


@contextmanager
def _attention_written_out(model: ViTScratchPreTrainedModel) -> Iterator[None]:
    """Evaluation mode and the attention that has its probabilities to give, and then what was there before."""
    implementation, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        model.set_attn_implementation(implementation)


def _embeddings(model: ViTScratchPreTrainedModel) -> ViTScratchEmbeddings:
    return cast(ViTScratchEmbeddings, model.base_model.embeddings)


@torch.no_grad()
def attention(model: ViTScratchPreTrainedModel, pixel_values: Tensor) -> Tensor:
    """The attention probabilities of every layer and head, whatever `attn_implementation` the model has.

    Args:
        model: Any model of ours. Its mode and its attention implementation are as before when this returns.
        pixel_values: (B, C, height, width), normalised, on the model's device.

    Returns:
        (B, L, H, N, N), at least float32. Row i says how much token i takes from each token, and sums to 1.
    """
    with _attention_written_out(model):
        probs = torch.stack(model(pixel_values, output_attentions=True).attentions, dim=1)
    return probs.to(torch.promote_types(probs.dtype, torch.float32))


def rollout(attentions: Tensor) -> Tensor:
    """How much of each input token is in each output token, if every layer only mixed tokens and kept half of each.

    Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928, section 3 and equation 1: the product over the layers of
    the mean over the heads, each with half of the identity for the residual connection.

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
    """Which patches speak for a class: attention, weighted by the gradient of the class's logit.

    Chefer et al. 2021, https://arxiv.org/abs/2103.15679, equations 5 and 6, with the identity, from which relevance
    starts, taken off. Unlike rollout it differs from class to class. The model's gradients are left alone.

    Args:
        model: A classifier.
        pixel_values: (B, C, height, width), normalised, on the model's device.
        class_ids: One for each image; `None` for the class that the model predicts.

    Returns:
        (B, rows, cols), 0 or more, at least float32; larger is more. They have no unit: compare patches of one image.

    Raises:
        ValueError: There is not one class for each image, or no such class.
    """
    with _attention_written_out(model), torch.enable_grad():
        # So that there are gradients of a model with frozen weights too.
        outputs = model(pixel_values.detach().requires_grad_(), output_attentions=True)
        logits = outputs.logits
        ids = logits.argmax(dim=-1) if class_ids is None else torch.as_tensor(class_ids, device=logits.device)
        if ids.shape != logits.shape[:1] or ids.min() < 0 or ids.max() >= logits.shape[-1]:
            raise ValueError(
                f"class_ids must be {len(logits)} numbers from 0 to {logits.shape[-1] - 1}, one for each image; got "
                f"{ids.tolist()}."
            )
        # The logit of one image has no gradient in another, so their sum does for all.
        gradients = torch.autograd.grad(logits.gather(1, ids[:, None].long()).sum(), outputs.attentions)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    identity = torch.eye(gradients[0].shape[-1], dtype=dtype, device=logits.device)
    relevance = identity.expand(len(logits), -1, -1)
    for probs, gradient in zip(outputs.attentions, gradients, strict=True):
        weighted = (probs.detach().to(dtype) * gradient.to(dtype)).clamp(min=0).mean(dim=1)
        relevance = relevance + weighted @ relevance
    grid = _embeddings(model).patch_embeddings.grid_size(pixel_values)
    return over_patches(relevance - identity, grid, pooling=model.config.pooling)


def over_patches(
    weights: Tensor, grid: tuple[int, int], patch: tuple[int, int] | None = None, *, pooling: str | None = None
) -> Tensor:
    """What one token, or the vector of the whole image, takes from each patch.

    Args:
        weights: (..., N, N), of `attention` or `rollout`.
        grid: rows and cols.
        patch: Row and column of the patch that takes, from 0; `None` for the vector that a classifier reads.
        pooling: Kind of that vector, `config.pooling`: cls or mean, of the patches. `None` for the class token where
            there is one; but a model can have one and read the mean.

    Returns:
        (..., rows, cols). What is taken from the class token is not in it.

    Raises:
        ValueError: The grid has more patches than there are tokens, or no such patch.
    """
    rows, cols = grid
    num_prefix_tokens = weights.shape[-1] - rows * cols
    if num_prefix_tokens < 0:
        raise ValueError(f"a grid of {rows} x {cols} patches has more than the {weights.shape[-1]} tokens there are.")
    if patch is None:
        of_class_token = num_prefix_tokens > 0 and pooling != "mean"
        row = weights[..., 0, :] if of_class_token else weights[..., num_prefix_tokens:, :].mean(dim=-2)
    elif 0 <= patch[0] < rows and 0 <= patch[1] < cols:
        row = weights[..., num_prefix_tokens + patch[0] * cols + patch[1], :]
    else:
        raise ValueError(f"patch must lie in the grid of {rows} rows and {cols} columns, from (0, 0); got {patch}.")
    return row[..., num_prefix_tokens:].unflatten(-1, grid)


@torch.no_grad()
def position_similarity(model: ViTScratchPreTrainedModel) -> Tensor:
    """The cosine similarity of each patch's position embedding with each other's.

    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7, middle.

    Returns:
        (rows, cols, rows, cols), at least float32, from -1 to 1.
    """
    grid = model.config.grid_size
    positions = _embeddings(model).position_embeddings[0, -math.prod(grid) :]
    positions = F.normalize(positions.to(torch.promote_types(positions.dtype, torch.float32)), dim=-1)
    return (positions @ positions.T).unflatten(1, grid).unflatten(0, grid)


@torch.no_grad()
def patch_filters(model: ViTScratchPreTrainedModel, number: int = MAX_FILTERS) -> Tensor:
    """The principal components of the patch embedding's filters, the largest first.

    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7, left.

    Returns:
        (number, C, patch height, patch width), each of length 1, its largest entry positive; at least float32. Fewer
        where a patch has fewer pixels or the model fewer filters.
    """
    weight = _embeddings(model).patch_embeddings.projection.weight
    filters = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    components = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:number]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return (components * largest.sign()).unflatten(1, weight.shape[1:])


def image_of(pixel_values: Tensor, image_processor: Any) -> NDArray[np.uint8]:
    """The image that the model sees, as pixels again.

    Args:
        pixel_values: (C, height, width), normalised.
        image_processor: By which they were made.

    Returns:
        (height, width, C).
    """
    pixels = pixel_values.detach().float().cpu()
    if image_processor.do_normalize:
        mean, std = (
            torch.tensor(numbers)[:, None, None] for numbers in (image_processor.image_mean, image_processor.image_std)
        )
        pixels = pixels * std + mean
    if image_processor.do_rescale:
        pixels = pixels / image_processor.rescale_factor
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


# Figures. Sizes are in inches, of which a page has about six and a half across.


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    return Figure(figsize=(width, height), layout="constrained")


def draw_heads(maps: Tensor, title: str) -> "Figure":
    """Every head of every layer: one row of maps for each layer, all in one scale of colours.

    Args:
        maps: (L, H, rows, cols), of `over_patches`.
        title: Says for which token.
    """
    num_layers, num_heads, rows, cols = maps.shape
    width = max(4.5, 1.0 + 0.75 * num_heads)
    side = min(1.0, (width - 1.5) / num_heads)
    figure = _figure(width, 0.9 + (side + 0.05) * rows / cols * num_layers)
    axes = figure.subplots(num_layers, num_heads, squeeze=False)
    highest = float(maps.max())
    for layer, head in np.ndindex(num_layers, num_heads):
        panel: Any = axes[layer, head]
        shown = panel.imshow(maps[layer, head].cpu().numpy(), cmap="viridis", vmin=0, vmax=highest)
        panel.set(xticks=[], yticks=[])
        if layer == 0:
            panel.set_title(f"head {head}" if head == 0 else f"{head}", fontsize=9)
        if head == 0:
            panel.set_ylabel(f"layer {layer}" if layer == 0 else f"{layer}", fontsize=9, rotation=0, ha="right")
    figure.colorbar(shown, ax=axes, label="share of the attention", shrink=min(1.0, 3 / num_layers), aspect=15)
    figure.suptitle(textwrap.fill(title, round(10 * width)), fontsize=11)
    return figure


def draw_over_image(image: NDArray[np.uint8], maps: Mapping[str, Tensor]) -> "Figure":
    """The image, and beside it in grey with each map over it, each in its own scale of colours.

    Args:
        image: (height, width, 3), or 1 channel.
        maps: (rows, cols) by title.
    """
    height, width = image.shape[:2]
    side = 2.4
    figure = _figure(side * (1 + len(maps)), side * height / width + 0.9)
    first, *others = figure.subplots(1, 1 + len(maps))
    first.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
    first.set_title("what the model sees", fontsize=10)
    for panel, (title, values) in zip(others, maps.items(), strict=True):
        panel.imshow(image.mean(axis=-1), cmap="gray", vmin=0, vmax=255)
        shown = panel.imshow(
            values.cpu().numpy(), cmap="viridis", vmin=0, alpha=0.65, extent=(-0.5, width - 0.5, height - 0.5, -0.5)
        )
        panel.set_title(title, fontsize=10)
        figure.colorbar(shown, ax=panel, orientation="horizontal", shrink=0.9).ax.tick_params(labelsize=7)
    for panel in (first, *others):
        panel.set(xticks=[], yticks=[], anchor="N")  # side by side, though not all have a scale below
    return figure


def draw_position_similarity(similarity: Tensor) -> "Figure":
    """One small map for each patch, where the patch lies: how alike its position is to each other's.

    Args:
        similarity: (rows, cols, rows, cols). Of a grid above 16 patches high or wide only some patches are shown.
    """
    rows, cols = similarity.shape[:2]
    step = math.ceil(max(rows, cols) / 16)
    shown_rows, shown_cols = range(0, rows, step), range(0, cols, step)
    figure = _figure(6.5, 0.7 + 5.4 * rows / cols)
    axes = figure.subplots(len(shown_rows), len(shown_cols), squeeze=False)
    for (i, row), (j, col) in ((a, b) for a in enumerate(shown_rows) for b in enumerate(shown_cols)):
        shown = axes[i, j].imshow(similarity[row, col].cpu().numpy(), cmap="cividis", vmin=-1, vmax=1)
        axes[i, j].set(xticks=[], yticks=[])
    figure.colorbar(shown, ax=axes, label="cosine similarity")
    figure.suptitle("Position embeddings: one map for each patch, at its place", fontsize=11)
    return figure


def draw_filters(filters: Tensor) -> "Figure":
    """The filters as small images, each stretched to its own range, grey for 0.

    Args:
        filters: (number, C, patch height, patch width); of other numbers of channels than 3 the mean is shown.
    """
    number, channels, height, width = filters.shape
    columns = min(7, number)
    lines = math.ceil(number / columns)
    figure = _figure(max(3.5, 0.85 * columns), 0.6 + 0.95 * lines * height / width)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for index, panel in enumerate(panels):
        panel.axis("off")
        if index < number:
            values = filters[index].cpu() if channels == 3 else filters[index].cpu().mean(dim=0, keepdim=True)
            stretched = 0.5 + 0.5 * values / values.abs().max()
            panel.imshow(stretched.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            panel.set_title(f"{index + 1}", fontsize=8)
    figure.suptitle("Patch embedding: principal components of its filters", fontsize=11)
    return figure


def draw_all(classifier: Any, image: Any) -> dict[str, "Figure"]:
    """All figures of a model and an image, by name.

    Args:
        classifier: The pipeline of `predict.load_classifier`, of a model of ours.
        image: A PIL image.

    Raises:
        UserError: The model is not one of ours.
    """
    model, image_processor = classifier.model, classifier.image_processor
    if not isinstance(model, ViTScratchForImageClassification):
        raise UserError(f"a model of hf_vit_scratch is needed, got {type(model).__name__}; `from_vit` converts one.")
    pixel_values = image_processor(images=image, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)
    grid = _embeddings(model).patch_embeddings.grid_size(pixel_values)
    seen = image_of(pixel_values[0], image_processor)
    maps = attention(model, pixel_values)
    with torch.no_grad():
        logits = model(pixel_values).logits.cpu()
    pooling = model.config.pooling
    reader = "the class token" if pooling == "cls" else "the mean of the patches"
    best = classifier.postprocess({"logits": logits}, top_k=2)
    ids = {label: id for id, label in cast(dict[int, str], model.config.id2label).items()}
    kind = "{:.4g}" if model.config.problem_type == "regression" else "{:.0%}"
    for_classes = {
        f"{class_['label']}: {kind.format(class_['score'])}": class_attention(
            model, pixel_values, [ids[class_["label"]]]
        )[0]
        for class_ in best
    }
    return {
        "attention": draw_heads(
            over_patches(maps, grid, pooling=pooling)[0], f"Attention: what {reader} takes from each patch"
        ),
        "rollout": draw_over_image(seen, {"attention rollout": over_patches(rollout(maps), grid, pooling=pooling)[0]}),
        "class_attention": draw_over_image(seen, for_classes),
        "position_similarity": draw_position_similarity(position_similarity(model)),
        "patch_filters": draw_filters(patch_filters(model)),
    }


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a folder that train.py has left, or a name on the Hub")
    parser.add_argument("image", metavar="IMAGE", help="a file")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="where the PNG files go")
    parser.add_argument("--device", help="such as cpu or cuda:1; the accelerator if there is one")
    args = parser.parse_args(argv)
    try:
        image = decode_image({"path": args.image, "bytes": None}, args.image)
        figures = draw_all(load_classifier(args.model, args.device), image)
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    for name, figure in figures.items():
        path = args.output_dir / f"{name}.png"
        figure.savefig(path, dpi=150)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
