"""The pictures of the explorer as HTML, by the template `figure.html`.

A picture has one pixel for each number, and the browser enlarges it: it is small to send and sharp at any size.
"""

import base64
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..attention_maps import ImageAttention, over_patches

TEMPLATE = jinja2.Template(Path(__file__).with_name("figure.html").read_text(encoding="utf-8"), autoescape=True)
VIEWS = {
    "patch": "What the chosen patch reads",
    "image": "What the whole image's vector reads",
    "rollout": "What reaches that vector through all layers (rollout)",
    "class": "What supports the predicted class (class attention)",
}


class Selection(NamedTuple):
    """What the user selected on the page. Numbers count from 1; head 0 is the mean of all heads."""

    view: str = "patch"
    layer: int = 1
    head: int = 0
    row: int = 1
    col: int = 1
    num_tokens: int = 1

    @property
    def layer_and_head(self) -> str:
        """Name of the selected attention."""
        return f"layer {self.layer}, {f'head {self.head}' if self.head else 'mean of the heads'}"

    def weights(self, image: ImageAttention) -> Tensor:
        """Return the selected attention.  (L, H, N, N) -> (N, N), float32."""
        layer = image.attentions[self.layer - 1].float()
        return layer[self.head - 1] if self.head else layer.mean(dim=0)


def draw_picture(image: ImageAttention, selection: Selection) -> str:
    """Draw the image with its patches."""
    (rows, cols), (height, width, _) = image.grid, image.pixels.shape
    note = f"{width} x {height} pixels in {cols} x {rows} patches"
    alt = f"The image as the model gets it, {note}; row {selection.row}, column {selection.col} is outlined."
    outline = (selection.col - 1, selection.row - 1, 1)
    fields = {"title": "What the model sees", "note": note, "alt": alt, "outline": outline, "lines": True}
    return _render(image.pixels, image.grid, width / height, **fields)


def draw_map(image: ImageAttention, selection: Selection) -> tuple[str, str]:
    """Draw the selected map, and describe it in a sentence."""
    view, (height, width, _) = selection.view, image.pixels.shape
    patch = (selection.row - 1, selection.col - 1) if view == "patch" else None
    note = "% of its attention to each patch"
    if view == "rollout":
        values, reader = image.rollout, "Through all layers, the whole image's vector takes"
    elif view == "class":
        values, reader = image.class_attention[0], f"The support for {image.predictions[0]['label']} comes"
        note = "relevance, without a unit"
    else:
        values = over_patches(selection.weights(image), image.grid, patch, pooling=image.pooling)
        reader = f"The patch in row {selection.row}, column {selection.col}" if patch else "The whole image's vector"
        reader, note = f"{reader} reads", f"{note}; {selection.layer_and_head}"
    row, col = (int(place) + 1 for place in np.unravel_index(int(values.argmax()), image.grid))
    highest = f"{float(values.max()):.3g}" if view == "class" else _percent(values.max())
    sentence = f"{reader} most from the patch in row {row}, column {col}: {highest}."
    fields = {"title": VIEWS[view], "note": note, "alt": f"{VIEWS[view]}. {sentence}", "highest": highest}
    outline = (patch[1], patch[0], 1) if patch else None
    return _render(_colors(values), image.grid, width / height, outline=outline, **fields), sentence


def draw_matrix(image: ImageAttention, selection: Selection) -> str:
    """Draw the attention among the first tokens, with the row of the selected patch outlined if it is one of them."""
    total, number = image.attentions.shape[-1], selection.num_tokens
    values = selection.weights(image)[:number, :number]
    num_prefix_tokens = total - math.prod(image.grid)
    token = num_prefix_tokens + (selection.row - 1) * image.grid[1] + selection.col - 1
    tokens = f"the first {number} of {total} tokens{' (1 is the class token)' if num_prefix_tokens else ''}"
    highest = _percent(values.max())
    alt = f"Attention matrix of {tokens}, {selection.layer_and_head}. The largest weight is {highest}."
    note = f"% that each row's token reads from each column's, {tokens}; {selection.layer_and_head}"
    fields = {"title": "Attention matrix", "note": note, "alt": alt, "highest": highest}
    outline = (0, token, number) if token < number else None
    return _render(_colors(values), (number, number), 1.0, outline=outline, **fields)


def _percent(share: Tensor) -> str:
    return f"{100 * float(share):.3g}%"


def _colors(values: Tensor) -> NDArray[np.uint8]:
    """Return colors for numbers from 0 to their largest.  (height, width) -> (height, width, 3)."""
    scaled = values / values.max().clamp(min=torch.finfo(values.dtype).tiny)
    return colormaps["viridis"](scaled.numpy(), bytes=True)[..., :3]


def _render(pixels: NDArray[np.uint8], grid: tuple[int, int], aspect_ratio: float, **fields: Any) -> str:
    """Return a figure that carries its own picture (height, width, 3 or 1) of `grid` rows and columns of cells."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG", compress_level=1)
    png = base64.b64encode(file.getvalue()).decode()
    return TEMPLATE.render(png=png, rows=grid[0], cols=grid[1], aspect_ratio=aspect_ratio, **fields)
