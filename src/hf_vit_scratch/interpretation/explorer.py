"""A web page on which one sees what a trained Vision Transformer attends to.

    vit-scratch explore runs/digits
    vit-scratch explore runs/digits --examples my_photos --open
    vit-scratch explore runs/digits --write_space space  # the files of a Hugging Face Space

Give the page an image, or choose one of its examples. It shows the patches that the model cuts it into, the predicted
classes, what a patch or the whole image's vector reads in each layer and head, rollout, class attention, and the
attention matrix of the first tokens. A patch is chosen by a click or by its row and column.

The page is served on this machine only and asks nothing of any other. An image's attention is computed once and kept,
in half precision, for the last visitors (`KEPT_BYTES`); clicks and sliders only draw. One image is computed at a time,
`QUEUE_SIZE` requests wait, and a further one is told that the page is busy. Uploads are checked for their size and
type before they are decoded, and deleted after `KEPT_SECONDS`.

Shapes: L layers, H heads, N tokens (the class token, if any, then the patches row by row), rows x cols patches.
"""

import argparse
import base64
import functools
import importlib.metadata
import importlib.util
import io
import json
import math
import shutil
import string
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import ImageClassificationPipeline

from ..data.images import MAX_PIXELS, decode_image
from ..data.splits import load_digits
from ..errors import UserError
from ..evaluation.predict import find_images, load_classifier
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .attention_maps import attention, class_attention, image_of, over_patches, rollout

if TYPE_CHECKING:
    import gradio

PROGRAM = "vit-scratch explore"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow has many more, some of which start other programs
MAX_FILE_BYTES = 20 * 2**20
KEPT_BYTES = 2**29
KEPT_SECONDS = 600
QUEUE_SIZE = 256
TOP_K = 5
NUM_EXAMPLES = 12
FILES = Path(__file__).with_name("explorer_files")
PACKAGE = Path(__file__).parents[1]
MODEL_FILES = ("config.json", "preprocessor_config.json", "model*.safetensors", "*.safetensors.index.json")
MEAN = "mean of the heads"
VIEWS = {
    "patch": "what the chosen patch reads",
    "image": "what the whole image's vector reads",
    "rollout": "what reaches that vector through all layers (rollout)",
    "class": "what speaks for the predicted class (class attention)",
}


@dataclass(frozen=True)
class Seen:
    """What an image does in a model: computed once, so that the page only has to draw."""

    picture: NDArray[np.uint8]  # (height, width, 3), as the model gets it
    predictions: list[dict[str, Any]]  # `label` and `score`, best first
    grid: tuple[int, int]
    pooling: str  # of the model: which vector the classifier reads
    attentions: Tensor  # (L, H, N, N), float16
    rollout: Tensor  # (rows, cols)
    class_attention: Tensor  # (rows, cols)


class Choice(NamedTuple):
    """What the page is asked to show. Numbers count from 1; head 0 is the mean of all."""

    view: str = "patch"
    layer: int = 1
    head: int = 0
    row: int = 1
    col: int = 1
    num_tokens: int = 1

    @property
    def heads(self) -> str:
        """Which attention is meant."""
        return f"layer {self.layer}, {f'head {self.head}' if self.head else MEAN}"

    @property
    def outlined(self) -> tuple[int, int, int, int]:
        """x, y, width and height of the patch, in patches."""
        return self.col - 1, self.row - 1, 1, 1

    def within(self, seen: Seen) -> "Choice":
        """The nearest choice that this image has."""
        num_layers, num_heads, num_tokens, _ = seen.attentions.shape
        limits = (num_layers, num_heads, *seen.grid, num_tokens)
        numbers = [min(max(int(number), 1), limit) for number, limit in zip(self[1:], limits, strict=True)]
        return Choice(self.view, *numbers)._replace(head=numbers[1] if self.head else 0)


class Explorer:
    """A model, and what it makes of images; used from many threads.

    Args:
        classifier: From `load_classifier`.
        name: Name of the model on the page.

    Raises:
        UserError: It is not a model of this package.
    """

    def __init__(self, classifier: ImageClassificationPipeline, name: str):
        if not isinstance(classifier.model, ViTScratchForImageClassification):
            given = type(classifier.model).__name__
            raise UserError(f"The explorer needs a ViTScratchForImageClassification, {name} holds a {given}.")
        self.classifier = classifier
        self.name = name
        self.is_regression = classifier.model.config.problem_type == "regression"
        self._lock = threading.Lock()  # attention sets the model's implementation for a while, and memory is bounded

    def look(self, image: Image.Image) -> Seen:
        """Compute all that the page shows of an image."""
        model = cast(ViTScratchForImageClassification, self.classifier.model)
        image_processor = cast(Any, self.classifier.image_processor)
        with self._lock:
            inputs = image_processor(images=image, return_tensors="pt").to(model.device, model.dtype)
            pixel_values = inputs["pixel_values"]
            encoder = cast(ViTScratchModel, model.base_model)
            grid = encoder.embeddings.patch_embeddings.grid_size(pixel_values)
            logits = self.classifier.forward(inputs)["logits"]
            attentions = attention(model, pixel_values)
            pixels = image_of(pixel_values[0], image_processor)
            return Seen(
                picture=np.broadcast_to(pixels, (*pixels.shape[:2], 3)),  # grey has one channel
                predictions=self.classifier.postprocess({"logits": logits}, top_k=TOP_K),
                grid=grid,
                pooling=model.config.pooling,
                attentions=attentions[0].half().cpu(),
                rollout=over_patches(rollout(attentions)[0], grid, pooling=model.config.pooling).cpu(),
                class_attention=class_attention(model, pixel_values)[0].cpu(),
            )

    def num_kept(self) -> int:
        """For how many visitors an image's attention is kept."""
        config = self.classifier.model.config
        num_tokens = config.num_prefix_tokens + math.prod(config.grid_size)
        per_image = 2 * config.num_hidden_layers * config.num_attention_heads * num_tokens**2
        return min(max(KEPT_BYTES // per_image, 2), 200)


def open_upload(content: bytes) -> Image.Image:
    """Decode a file that may be anything, upright and in RGB.

    Raises:
        UserError: It is too large, of another type, or broken.
    """
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"A file may have {MAX_FILE_BYTES / 2**20:g} MB, this has {len(content) / 2**20:.1f}.")
    too_large = UserError(f"An image may have {MAX_PIXELS / 1e6:g} megapixels, this has more. Give a smaller one.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged file decode_image says more
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:  # reads the header only
                width, height = image.size
    except Image.DecompressionBombError as error:
        raise too_large from error
    except Exception as error:  # Pillow's readers raise many types on damaged data
        raise UserError(f"This is no file of the types {', '.join(FORMATS)}. Give another image.") from error
    if width * height > MAX_PIXELS:
        raise too_large
    try:
        return decode_image({"path": None, "bytes": content}, "This file")
    except UserError as error:
        raise UserError(f"{str(error).removesuffix(' Delete or replace it.')} Give another.") from error


def patch_at(x: float, y: float, grid: tuple[int, int]) -> tuple[int, int]:
    """Row and column, from 1, of the patch at a place in the picture; x and y go from 0 at the top left to 1."""
    rows, cols = grid
    return (1 + min(max(int(y * rows), 0), rows - 1), 1 + min(max(int(x * cols), 0), cols - 1))


def weights_of(seen: Seen, choice: Choice) -> Tensor:
    """The attention of one head, or the mean of all.  (L, H, N, N) -> (N, N), float32."""
    layer = seen.attentions[choice.layer - 1].float()
    return layer[choice.head - 1] if choice.head else layer.mean(dim=0)


def map_of(seen: Seen, choice: Choice) -> Tensor:
    """The chosen map.  (rows, cols)."""
    if choice.view == "rollout":
        return seen.rollout
    if choice.view == "class":
        return seen.class_attention
    patch = (choice.row - 1, choice.col - 1) if choice.view == "patch" else None
    return over_patches(weights_of(seen, choice), seen.grid, patch, pooling=seen.pooling)


# The pictures have one pixel for each number and are enlarged by the browser: small to send, sharp at any size.


def colours(values: Tensor) -> NDArray[np.uint8]:
    """Numbers from 0 to their largest in colours that the colour-blind can tell apart.  (..., ) -> (..., 3)."""
    from matplotlib import colormaps

    scaled = (values / values.max().clamp(min=torch.finfo(values.dtype).tiny)).clamp(min=0)
    return colormaps["viridis"](scaled.numpy(), bytes=True)[..., :3]


def encode(image: Image.Image) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def picture_html(pixels: NDArray[np.uint8], alt: str, shape: tuple[float, float], marks: str = "") -> str:
    """A picture that carries its own data, with marks over it.

    Args:
        pixels: (height, width, 3).
        alt: Text for screen readers.
        shape: Height and width, for the proportions.
        marks: Result of `marks_html`.
    """
    data = base64.b64encode(encode(Image.fromarray(np.ascontiguousarray(pixels)))).decode()
    height, width = shape
    return (
        f'<div class="vit-stack" style="aspect-ratio: {width} / {height}">'
        f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}">{marks}</div>'
    )


def marks_html(
    rows: int, cols: int, outlined: tuple[int, int, int, int] | None, lines: bool = False, kind: str = ""
) -> str:
    """What lies over a picture of so many rows and columns: an outline (x, y, width, height), lines between all."""
    path = "".join(f"M0 {y}H{cols}" for y in range(1, rows)) + "".join(f"M{x} 0V{rows}" for x in range(1, cols))
    content = f'<path class="vit-line" d="{path}"/>' if lines else ""
    if outlined:
        place = 'x="{}" y="{}" width="{}" height="{}"'.format(*outlined)
        content += f'<rect class="vit-outer" {place}/><rect class="vit-inner" {place}/>'
    box = f'viewBox="0 0 {cols} {rows}" preserveAspectRatio="none" aria-hidden="true"'
    return f'<svg class="{kind}" {box}>{content}</svg>'


def figure_html(title: str, note: str, picture: str, highest: str = "") -> str:
    """A picture under its title, with the scale of its colours where it has one."""
    scale = f'<p class="vit-scale"><span>0</span><span class="vit-bar"></span><span>{highest}</span></p>'
    return (
        f'<figure class="vit-figure"><figcaption><b>{escape(title)}</b><br>{escape(note)}</figcaption>{picture}'
        f"{scale if highest else ''}</figure>"
    )


def draw_picture(seen: Seen, choice: Choice) -> str:
    """The image in its patches."""
    (rows, cols), (height, width, _) = seen.grid, seen.picture.shape
    what = f"{width} x {height} pixels in {cols} x {rows} patches"
    alt = f"The image as the model gets it, {what}; the patch in row {choice.row}, column {choice.col} is outlined."
    marks = marks_html(rows, cols, choice.outlined, lines=True)
    return figure_html("What the model sees", what, picture_html(seen.picture, alt, (height, width), marks))


def draw_map(seen: Seen, choice: Choice) -> tuple[str, str]:
    """The chosen map as a picture, and the same in a sentence."""
    values = map_of(seen, choice)
    row, col = (int(place) + 1 for place in np.unravel_index(int(values.argmax()), seen.grid))
    reader = {
        "patch": f"The patch in row {choice.row}, column {choice.col} reads",
        "image": "The whole image's vector reads",
        "rollout": "Through all layers, the whole image's vector takes",
        "class": f"For {seen.predictions[0]['label']} speaks",
    }[choice.view]
    if choice.view == "class":
        highest, unit = f"{float(values.max()):.3g}", "relevance, in no unit"
        sentence = f"{reader} most the patch in row {row}, column {col}."
    else:
        highest, unit = f"{100 * float(values.max()):.3g}%", "% of its attention to each patch"
        sentence = f"{reader} most from the patch in row {row}, column {col}: {highest}."
    if choice.view in ("patch", "image"):
        unit += f"; {choice.heads}"
    height, width, _ = seen.picture.shape
    marks = marks_html(*seen.grid, choice.outlined if choice.view == "patch" else None)
    picture = picture_html(colours(values), f"Map of {VIEWS[choice.view]}. {sentence}", (height, width), marks)
    title = VIEWS[choice.view]
    return figure_html(title[0].upper() + title[1:], unit, picture, highest), sentence


def draw_matrix(seen: Seen, choice: Choice) -> str:
    """The attention among the first tokens; the row of the chosen patch is outlined where it is among them."""
    total, number = seen.attentions.shape[-1], choice.num_tokens
    values = weights_of(seen, choice)[:number, :number]
    prefix = total - math.prod(seen.grid)
    token = prefix + (choice.row - 1) * seen.grid[1] + choice.col  # from 1
    tokens = f"the first {number} of {total} tokens{' (1 is the class token)' if prefix else ''}"
    marks = marks_html(number, number, (0, token - 1, number, 1) if token <= number else None, kind="vit-thin")
    alt = f"Attention matrix of {tokens}, {choice.heads}. The largest weight is {values.max():.1%}."
    return figure_html(
        "Attention matrix",
        f"% that each row's token reads from each column's, {tokens}; {choice.heads}",
        picture_html(colours(values), alt, (1, 1), marks),
        f"{100 * float(values.max()):.3g}%",
    )


def predictions_html(seen: Seen, is_regression: bool = False) -> str:
    """The best classes in a table."""
    rows = []
    for best in seen.predictions:
        score = f"{best['score']:.4g}" if is_regression else f"{100 * best['score']:.1f}%"
        width = 0 if is_regression else 100 * best["score"]
        bar = f'<span class="vit-share" style="width: {width:.1f}%" aria-hidden="true"></span>'
        rows.append(f'<tr><th scope="row">{escape(str(best["label"]))}{bar}</th><td>{score}</td></tr>')
    head = f'<tr><th scope="col">Class</th><th scope="col">{"Value" if is_regression else "Confidence"}</th></tr>'
    caption = "<caption>What the model predicts</caption>"
    return f'<table class="vit-table">{caption}<thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'


def status_html(text: str, problem: bool = False) -> str:
    """What has just happened."""
    return f'<p class="vit-status{" vit-problem" if problem else ""}">{escape(text)}</p>'


def examples_html(examples: Sequence[tuple[str, bytes]]) -> str:
    """A button for each example."""
    buttons = []
    for number, (name, content) in enumerate(examples):
        small = open_upload(content)
        small.thumbnail((96, 96))
        picture = picture_html(np.asarray(small), f"Example: {name}", (1, 1))
        buttons.append(f'<button type="button" data-example="{number}">{picture}</button>')
    return f'<div class="vit-examples">{"".join(buttons)}</div>'


PICK = """element.addEventListener('click', event => {
    const stack = event.target.closest('.vit-stack')
    if (!stack) return
    const box = stack.getBoundingClientRect()
    trigger('click', {x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height})
})"""
PICK_EXAMPLE = """element.addEventListener('click', event => {
    const button = event.target.closest('button')
    if (button) trigger('click', {example: Number(button.dataset.example)})
})"""
ANNOUNCE = "element.setAttribute('role', 'status'); element.setAttribute('aria-live', 'polite')"


def load_examples(folder: str | None = None, labels: Iterable[str] = ()) -> list[tuple[str, bytes]]:
    """Names and files of images that the page offers.

    Args:
        folder: Folder of images; the first `NUM_EXAMPLES` are taken. `None` for some that scikit-learn ships.
        labels: Labels of the model. If they are digits, so are the examples, else photographs.

    Raises:
        UserError: The folder holds no image, or one that the page would refuse.
    """
    if folder is not None:
        files = [Path(file) for file in find_images([folder])[:NUM_EXAMPLES]]
        for file in files:
            try:
                open_upload(file.read_bytes())
            except (UserError, OSError) as error:
                raise UserError(f"{file} cannot be an example. {error}") from error
        return [(file.stem, file.read_bytes()) for file in files]
    if set(labels) <= set(string.digits):
        digits = load_digits()["test"].select(range(12))  # which a model of the digits has not been trained on
        images = {f"handwritten {label}": image for label, image in zip(digits["label"], digits["image"], strict=True)}
    else:
        from sklearn.datasets import load_sample_images

        photographs = map(Image.fromarray, load_sample_images().images)
        images = dict(zip(("temple", "flower"), photographs, strict=True))
    return [(name, encode(image)) for name, image in images.items()]


def _require_gradio() -> None:
    if importlib.util.find_spec("gradio") is None:
        raise UserError('The explorer needs Gradio: pip install "hf-vit-scratch[explorer]"')


def build_page(explorer: Explorer, examples: Sequence[tuple[str, bytes]]) -> "gradio.Blocks":
    """The page, for `serve` to start.

    Args:
        explorer: Computes what it shows.
        examples: Names and files of images, of which the first is shown at the start.
    """
    import gradio as gr

    config = explorer.classifier.model.config
    rows, cols = config.grid_size
    sides = (("Row", rows), ("Column", cols))
    total = config.num_prefix_tokens + rows * cols
    see_example = functools.cache(lambda number: explorer.look(open_upload(examples[number][1])))

    def draw(seen: Seen, choice: Choice, news: str = "") -> tuple[str, ...]:
        heat_map, sentence = draw_map(seen, choice)
        return draw_picture(seen, choice), heat_map, draw_matrix(seen, choice), status_html(news + sentence)

    def redraw(seen: Seen | None, *fields: Any) -> tuple[Any, ...]:
        if seen is None:
            return (*[gr.skip()] * 3, status_html("This image is no longer kept. Give it again.", problem=True))
        return draw(seen, Choice(*fields).within(seen))

    def show(seen: Seen, *fields: Any) -> tuple[Any, ...]:
        news = f"Predicted: {seen.predictions[0]['label']}. "
        table = predictions_html(seen, explorer.is_regression)
        return None, seen, table, *draw(seen, Choice(*fields).within(seen), news)  # None: the next file can come

    def open_file(content: bytes | None, *fields: Any) -> tuple[Any, ...]:
        try:
            if content is None:
                raise UserError("No file has arrived. Give an image.")
            return show(explorer.look(open_upload(content)), *fields)
        except UserError as error:
            return None, *[gr.skip()] * 5, status_html(str(error), problem=True)

    def open_example(event: gr.EventData, *fields: Any) -> tuple[Any, ...]:
        return show(see_example(range(len(examples))[int(event.example)]), *fields)

    def pick(event: gr.EventData, seen: Seen | None, *fields: Any) -> tuple[Any, ...]:
        row, col = patch_at(float(event.x), float(event.y), seen.grid if seen else (rows, cols))
        return "patch", row, col, *redraw(seen, *Choice(*fields)._replace(view="patch", row=row, col=col))

    async def uploads_only(url_or_file_path: str | Path | None) -> str | None:
        if url_or_file_path and not Path(url_or_file_path).is_absolute():
            raise gr.Error("Give a file, not an address.")
        return await gr.File.async_move_resource_to_block_cache(upload, url_or_file_path)

    def slider(label: str, highest: int, value: int) -> gr.Slider:
        return gr.Slider(1, highest, value, step=1, label=label, buttons=[])

    title = f"What the model {explorer.name} looks at"
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(KEPT_SECONDS // 10, KEPT_SECONDS)) as page:
        state = gr.State()
        gr.HTML(
            f"<h1>{escape(title)}</h1><p>A Vision Transformer of {config.num_hidden_layers} layers with "
            f"{config.num_attention_heads} heads each. Give it an image, then click a patch.</p>"
        )
        status = gr.HTML(status_html("Loading."), js_on_load=ANNOUNCE, elem_id="status")
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                gr.HTML(
                    f"<h2>Image</h2><p>{', '.join(FORMATS)}; up to {MAX_FILE_BYTES // 2**20} MB and "
                    f"{MAX_PIXELS // 10**6} megapixels. Or one of the examples.</p>"
                )
                upload = gr.File(label="Your image", file_types=["image"], type="binary", height=160)
                # Gradio would load what a client names by its address, of any size, before anything of ours runs.
                upload.async_move_resource_to_block_cache = uploads_only  # type: ignore[method-assign]
                example = gr.HTML(examples_html(examples), js_on_load=PICK_EXAMPLE, elem_id="examples")
                predictions = gr.HTML(elem_id="predictions")
            with gr.Column(scale=3, min_width=320):
                gr.HTML("<h2>Attention</h2>")
                view = gr.Radio([(label, name) for name, label in VIEWS.items()], value="patch", label="Show")
                with gr.Row():
                    layer = slider("Layer", config.num_hidden_layers, config.num_hidden_layers)
                    heads = [(MEAN, 0), *((str(head), head) for head in range(1, config.num_attention_heads + 1))]
                    head = gr.Radio(heads, value=0, label="Head")
                with gr.Row():
                    row, col = (slider(f"{which} of the patch", number, (number + 1) // 2) for which, number in sides)
                with gr.Row():
                    with gr.Column(min_width=260):
                        picture = gr.HTML(js_on_load=PICK, elem_id="picture", elem_classes="vit-pick")
                    with gr.Column(min_width=260):
                        heat_map = gr.HTML(js_on_load=PICK, elem_id="map", elem_classes="vit-pick")
                    with gr.Column(min_width=260):
                        matrix = gr.HTML(elem_id="matrix")
                        num_tokens = slider("Tokens in the matrix", total, min(total, 32))
        fields: list[Any] = [view, layer, head, row, col, num_tokens]
        drawn = [picture, heat_map, matrix, status]
        shown = [upload, state, predictions, *drawn]
        # One at a time through the model; drawing takes milliseconds. Of a moving slider only the last place counts.
        heavy: dict[str, Any] = {"concurrency_id": "compute", "concurrency_limit": 1, "show_progress_on": status}
        light: dict[str, Any] = {"concurrency_id": "draw", "concurrency_limit": 4, "show_progress": "hidden"}
        light |= {"trigger_mode": "always_last", "api_visibility": "private"}
        upload.upload(open_file, [upload, *fields], shown, api_name="look", **heavy)
        heavy["api_visibility"] = "private"
        example.click(open_example, fields, shown, **heavy)
        page.load(lambda *fields: show(see_example(0), *fields), fields, shown, **heavy)
        gr.on([field.input for field in fields], redraw, [state, *fields], drawn, **light)
        for pictured in (picture, heat_map):
            pictured.click(pick, [state, *fields], [view, row, col, *drawn], **light)
    return page


def serve(
    model: str,
    *,
    examples: str | None = None,
    device: str | None = None,
    port: int | None = None,
    open_browser: bool = False,
) -> None:
    """Serve the page until interrupted; on this machine only, unless GRADIO_SERVER_NAME says otherwise, as in a Space.

    Args:
        model: A folder as `train.py` leaves it, or a name on the Hub.
        examples: A folder of images.
        device: As for `load_classifier`.
        port: `None` for the first free one from 7860.
        open_browser: Whether to open the page in this machine's browser.

    Raises:
        UserError: Gradio is not installed, the port is taken, or there is no such model, device, or image.
    """
    _require_gradio()
    explorer = Explorer(load_classifier(model, device), Path(model).resolve().name)
    labels = cast(dict[int, str], explorer.classifier.model.config.id2label).values()
    page = build_page(explorer, load_examples(examples, labels)).queue(max_size=QUEUE_SIZE, api_open=False)
    try:
        _, url, _ = page.launch(
            server_port=port,
            inbrowser=open_browser,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            max_file_size=MAX_FILE_BYTES,
            state_session_capacity=explorer.num_kept(),
            css_paths=FILES / "page.css",
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            mcp_server=False,
            ssr_mode=False,
            pwa=False,
        )
    except OSError as error:
        raise UserError(f"Port {port or '7860 to 7959'} is taken. Give another --port.") from error
    print(f"The explorer is at {url}  (Ctrl+C ends it)", flush=True)
    page.block_thread()


APP = """import os
import sys

from hf_vit_scratch.interpretation.explorer import main

os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.exit(main({arguments}))
"""


def write_space(model: str, space: Path, examples: str | None = None) -> None:
    """Write a Hugging Face Space of the explorer, with all it needs; this package is copied too.

    Args:
        model: A folder, of which the model's files are copied, or a name on the Hub, from which the Space loads it.
        space: A new folder to write.
        examples: A folder of images, to be copied.

    Raises:
        UserError: The folder exists, or the explorer could not show this model or these examples.
    """
    _require_gradio()
    if space.exists():
        raise UserError(f"--write_space {space} exists. Give the name of a new folder.")
    source, name, arguments = Path(model).expanduser(), Path(model).resolve().name, [model]
    Explorer(load_classifier(model, "cpu"), name)
    load_examples(examples)
    copies = {"hf_vit_scratch": [file for file in PACKAGE.rglob("*.*") if file.suffix != ".pyc"]}
    if source.is_dir():
        copies["model"] = [file for pattern in MODEL_FILES for file in source.glob(pattern)]
        arguments = ["model"]
    if examples:
        copies["examples"] = [Path(file) for file in find_images([examples])[:NUM_EXAMPLES]]
        arguments += ["--examples", "examples"]
    roots = {"hf_vit_scratch": PACKAGE, "examples": Path(examples or "").expanduser()}
    for folder, files in copies.items():
        for file in files:
            root = roots.get(folder)
            inside = file.relative_to(root) if root is not None and root.is_dir() else file.name
            (space / folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, space / folder / inside)
    card = (
        (FILES / "space_card.md")
        .read_text(encoding="utf-8")
        .format(
            name=name,
            gradio=importlib.metadata.version("gradio"),
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            models=json.dumps([] if source.is_dir() else [model]),
        )
    )
    requirements = [line for line in importlib.metadata.requires("hf-vit-scratch") or [] if "extra ==" not in line]
    for file_name, text in (
        ("app.py", APP.format(arguments=json.dumps(arguments))),
        ("requirements.txt", "\n".join(requirements) + "\n"),  # Gradio is of the version in the card
        ("README.md", card),
        (".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"),
    ):
        (space / file_name).write_text(text, encoding="utf-8")


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a folder that train.py has left, or a name on the Hub")
    parser.add_argument("--examples", metavar="FOLDER", help="your images instead of digits and photographs")
    parser.add_argument("--device", help="such as cpu or cuda:1; the accelerator if there is one")
    parser.add_argument("--port", type=int, help="the first free one from 7860")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--write_space", type=Path, metavar="FOLDER", help="write a Hugging Face Space, and end")
    args = parser.parse_args(argv)
    try:
        if args.write_space:
            write_space(args.model, args.write_space, args.examples)
            print(f"{args.write_space} is written. Push it to a Space, after a look at its README.md.")
        else:
            serve(args.model, examples=args.examples, device=args.device, port=args.port, open_browser=args.open)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
