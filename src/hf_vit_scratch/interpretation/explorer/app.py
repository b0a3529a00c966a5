"""Show on a web page what a trained Vision Transformer attends to.

    vit-scratch explore runs/digits
    vit-scratch explore runs/digits --write_space space  # the files of a Hugging Face Space

Give the page an image, or choose one of its examples. It shows the patches that the model sees, the predicted classes,
what a patch or the vector of the whole image reads in each layer and head, rollout, class attention, and the attention
among the first tokens. Click a patch to select it, or give its row and column.

The page is served on this machine only and contacts no other. The attention in an image is computed once; clicks and
sliders only draw. One image is computed at a time, and 256 requests wait at most.
"""

import functools
import io
import string
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import ImageClassificationPipeline

from ...data.images import ADVICE, MAX_PIXELS, decode_image, local_path
from ...data.sources import load_digits
from ...errors import UserError
from ...evaluation.predict import load_classifier, model_parser
from ..attention_maps import ImageAttention, format_prediction, inspect_image
from .rendering import VIEWS, Selection, draw_map, draw_matrix, draw_picture
from .space import write_space

try:
    import gradio as gr
except ImportError as error:
    raise UserError('The explorer needs Gradio: pip install -e ".[explorer]"') from error

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow has many more, some of which start other programs
MAX_FILE_BYTES = 20 * 2**20
KEPT_VISITORS = 20  # whose attention stays in memory: 30 MB each for L/16 at 224 pixels
KEPT_SECONDS = 600  # uploads are deleted afterwards
QUEUE_SIZE = 256
ON_CLICK = Path(__file__).with_name("on_click.js").read_text(encoding="utf-8")
ANNOUNCE = "element.setAttribute('role', 'status'); element.setAttribute('aria-live', 'polite')"


def open_upload(content: bytes) -> Image.Image:
    """Decode an uploaded file, which may be anything, to upright RGB pixels."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=FORMATS):
            pass
    except Exception as error:  # Pillow's readers raise many types on damaged data
        limit = f"at most {MAX_PIXELS / 1e6:g} megapixels"
        raise UserError(f"The file must be an image of type {', '.join(FORMATS)} with {limit}.") from error
    return decode_image({"path": None, "bytes": content}, "This file")


def load_examples(labels: Sequence[str]) -> list[tuple[Image.Image, str]]:
    """Return images with names: handwritten digits for a model of digits, else photographs."""
    if set(labels) <= set(string.digits):
        digits = load_digits()["test"].select(range(12))  # not used for training
        rows = zip(digits["image"], digits["label"], strict=True)
        return [(image.convert("RGB"), f"handwritten {label}") for image, label in rows]
    from sklearn.datasets import load_sample_images

    photographs = map(Image.fromarray, load_sample_images().images)
    return list(zip(photographs, ("temple", "flower"), strict=True))


class Explorer:
    """The answers to the events of the page."""

    def __init__(self, classifier: ImageClassificationPipeline, name: str):
        config: Any = classifier.model.config
        self.classifier, self.name = classifier, name
        self.is_regression = config.problem_type == "regression"
        self.examples = load_examples(list(config.id2label.values()))
        self.first = inspect_image(classifier, self.examples[0][0])

    @staticmethod
    def draw(image: ImageAttention | None, *fields: Any, news: str = "") -> tuple[str, ...]:
        """Return picture, map, matrix and status for a selection."""
        if image is None:
            raise gr.Error("This image is no longer in memory. Upload or choose it again.", print_exception=False)
        selection = Selection(*fields)
        heat_map, sentence = draw_map(image, selection)
        status = f'<p class="vit-status">{escape(news + sentence)}</p>'
        return draw_picture(image, selection), heat_map, draw_matrix(image, selection), status

    def show(self, image: ImageAttention, *fields: Any) -> tuple[Any, ...]:
        """Return the new state and predictions, and what `draw` returns."""
        predictions: Any = {one["label"]: one["score"] for one in reversed(image.predictions)}  # best of a name
        news = image.predictions[0]["label"]
        if self.is_regression:  # the widget shows scores as percentages
            predictions = news = ", ".join(format_prediction(number, "regression") for number in image.predictions)
        return image, predictions, *self.draw(image, *fields, news=f"Predicted: {news}. ")

    def show_example(self, event: gr.SelectData, *fields: Any) -> tuple[Any, ...]:
        """Show the selected example."""
        return self.show(inspect_image(self.classifier, self.examples[event.index][0]), *fields)

    def show_upload(self, content: bytes | None, *fields: Any) -> tuple[Any, ...]:
        """Show an uploaded file."""
        try:
            return self.show(inspect_image(self.classifier, open_upload(content or b"")), *fields)
        except UserError as error:
            raise gr.Error(str(error).removesuffix(ADVICE), print_exception=False) from error

    def select_patch(self, event: gr.EventData, image: ImageAttention | None, *fields: Any) -> tuple[Any, ...]:
        """Select the patch at a click and draw."""
        selection = Selection(*fields)._replace(view="patch", row=event.row, col=event.col)
        return selection.view, selection.row, selection.col, *self.draw(image, *selection)


def _refuse_addresses(upload: gr.File) -> None:
    """Let a file input take uploads only: Gradio loads addresses, whatever their size, before a handler runs."""

    async def move_upload(path: str | Path | None) -> str | None:
        if path and not Path(path).is_absolute():
            raise gr.Error("Give a file, not an address.")
        return await gr.File.async_move_resource_to_block_cache(upload, path)

    upload.async_move_resource_to_block_cache = move_upload  # type: ignore[method-assign, assignment]


def build_page(explorer: Explorer) -> gr.Blocks:
    """Return the page of an explorer."""
    num_layers, num_heads, num_tokens, _ = explorer.first.attentions.shape
    rows, cols = explorer.first.grid
    title = f"What the model {explorer.name} attends to"
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(KEPT_SECONDS // 10, KEPT_SECONDS)) as page:
        size = f"A Vision Transformer of {num_layers} layers with {num_heads} heads each."
        gr.HTML(f"<h1>{escape(title)}</h1><p>{size} Give it an image, then click a patch.</p>")
        status = gr.HTML('<p class="vit-status">Loading.</p>', js_on_load=ANNOUNCE, elem_id="status")
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                limits = f"up to {MAX_FILE_BYTES // 2**20} MB and {MAX_PIXELS // 10**6} megapixels"
                gr.HTML(f"<h2>Image</h2><p>{', '.join(FORMATS)}; {limits}. Or one of the examples.</p>")
                upload = gr.File(label="Your image", file_types=["image"], type="binary", height=160)
                _refuse_addresses(upload)
                examples = gr.Gallery(
                    explorer.examples, show_label=False, format="png", columns=3, height=240, allow_preview=False,
                    interactive=False, buttons=[], elem_id="examples",
                )  # fmt: skip
                predictions = gr.Label(label="What the model predicts", elem_id="predictions")
            with gr.Column(scale=3, min_width=320):
                gr.HTML("<h2>Attention</h2>")
                view = gr.Radio([(label, name) for name, label in VIEWS.items()], value="patch", label="Show")
                with gr.Row():
                    layer = _slider(num_layers, num_layers, "Layer")
                    heads = [("mean of the heads", 0), *((str(head), head) for head in range(1, num_heads + 1))]
                    head = gr.Radio(heads, value=0, label="Head")
                with gr.Row():
                    row = _slider(rows, (rows + 1) // 2, "Row of the patch")
                    col = _slider(cols, (cols + 1) // 2, "Column of the patch")
                with gr.Row():
                    with gr.Column(min_width=260):
                        picture = gr.HTML(js_on_load=ON_CLICK, elem_id="picture", elem_classes="vit-click")
                    with gr.Column(min_width=260):
                        heat_map = gr.HTML(js_on_load=ON_CLICK, elem_id="map", elem_classes="vit-click")
                    with gr.Column(min_width=260):
                        matrix = gr.HTML(elem_id="matrix")
                        number = _slider(num_tokens, min(num_tokens, 32), "Tokens")
        shown = [gr.State(), predictions, picture, heat_map, matrix, status]
        _connect(page, explorer, upload, examples, [view, layer, head, row, col, number], shown)
    return page


def _slider(number: int, value: int, label: str) -> gr.Slider:
    """Return a slider from 1 to a number; where there is nothing to choose, it is not shown."""
    return gr.Slider(1, max(number, 2), value, step=1, label=label, buttons=[], visible=number > 1)


def _connect(
    page: gr.Blocks, explorer: Explorer, upload: gr.File, examples: gr.Gallery, fields: list[Any], shown: list[Any]
) -> None:
    """Let the explorer answer the events of the page: `shown` starts with the state and the predictions."""
    (state, _, *drawn), (view, _, _, row, col, _) = shown, fields
    # The model computes one image at a time. Drawing takes milliseconds.
    compute: dict[str, Any] = {"concurrency_id": "compute", "concurrency_limit": 1, "show_progress_on": drawn[-1]}
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    # While a slider moves, only its last value counts.
    draw = quiet | {"concurrency_limit": 4, "trigger_mode": "always_last"}
    given = upload.upload(explorer.show_upload, [upload, *fields], shown, api_name="explore", **compute)
    chosen = examples.select(explorer.show_example, fields, shown, api_visibility="private", **compute)
    # Reset them, so that the same file or example can be given again. Gradio's `then` misses failures.
    for ended in (given.success, given.failure, chosen.success):
        ended(lambda: (None, gr.Gallery(selected_index=None)), None, [upload, examples], queue=False, **quiet)
    page.load(functools.partial(explorer.show, explorer.first), fields, shown, **draw)
    gr.on([field.input for field in fields], explorer.draw, [state, *fields], drawn, **draw)
    for clicked in drawn[:2]:
        clicked.click(explorer.select_patch, [state, *fields], [view, row, col, *drawn], **draw)


def main(argv: list[str]) -> None:
    """Run `vit-scratch explore`."""
    parser = model_parser("vit-scratch explore", __doc__)
    parser.add_argument("--port", type=int, help="port of this machine (default: the first free one from 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--write_space", type=local_path, metavar="FOLDER", help="write a Hugging Face Space instead")
    args = parser.parse_args(argv)
    if args.port is not None and not 0 < args.port < 2**16:
        raise UserError(f"--port must be from 1 to 65535, got {args.port}.")
    explorer = Explorer(load_classifier(args.model, args.device), Path(args.model).resolve().name)
    if args.write_space:
        write_space(explorer.classifier, explorer.name, args.write_space)
        print(f"{args.write_space} is written. Check its README.md, then push it to a Space.")
        return
    build_page(explorer).queue(max_size=QUEUE_SIZE, api_open=False).launch(
        server_port=args.port,
        inbrowser=args.open,
        share=False,
        max_file_size=MAX_FILE_BYTES,
        state_session_capacity=KEPT_VISITORS,
        css_paths=Path(__file__).with_name("page.css"),
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
    )
