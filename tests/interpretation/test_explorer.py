"""The explorer: its pictures, the uploads that it refuses, the page in a real browser, and the Space."""

import base64
import dataclasses
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import matplotlib
import numpy as np
import pytest
import torch
from helpers import TINY, randomize_
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.predict import load_classifier
from hf_vit_scratch.interpretation.attention_maps import ImageAttention, inspect_image
from hf_vit_scratch.interpretation.explorer import app
from hf_vit_scratch.interpretation.explorer.app import MAX_FILE_BYTES, load_examples, open_upload
from hf_vit_scratch.interpretation.explorer.rendering import Selection, draw_map, draw_matrix, draw_picture

LABELS = ["ant", "bee", "<b>cat</b>", "dog", "eel"]
ROWS, COLS = 4, 3  # of TINY's patches
CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"


def save_model(folder, **fields):
    config = ViTScratchConfig(**TINY | {"id2label": dict(enumerate(LABELS))} | fields)
    randomize_(ViTScratchForImageClassification(config), 0.2).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True).save_pretrained(folder)
    return folder


def random_attention(num_prefix_tokens=1):
    """Return two layers of three heads with numbers that half precision holds exactly."""
    num_tokens = num_prefix_tokens + ROWS * COLS
    return ImageAttention(
        pixels=np.random.randint(256, size=(16, 24, 3), dtype=np.uint8),
        predictions=[{"label": "dog", "score": 0.75}, {"label": LABELS[2], "score": 0.25}],
        grid=(ROWS, COLS),
        pooling="cls" if num_prefix_tokens else "mean",
        attentions=(torch.randint(1, 256, (2, 3, num_tokens, num_tokens)) / 256).half(),
        rollout=torch.rand(ROWS, COLS),
        class_attention=7 * torch.rand(1, ROWS, COLS),
    )


def pixels_of(html):
    """Return the pixels of the only picture in a part of the page."""
    ((data, alt),) = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', html)
    assert alt
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image)


def in_colors(values):
    values = np.asarray(values, dtype=np.float32)
    return matplotlib.colormaps["viridis"](values / values.max(), bytes=True)[..., :3]


def file_of(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of_size(width, height):
    """Return a small file whose header announces a large image."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")


# The attention in an image


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean", "attn_implementation": "sdpa"}], ids=["cls", "mean"])
def test_inspected_image_equals_the_models_outputs(fields, tmp_path, photographs):
    folder = save_model(tmp_path / "model", **fields)
    image = inspect_image(load_classifier(str(folder), "cpu"), photographs[0])

    model = ViTScratchForImageClassification.from_pretrained(folder, attn_implementation="eager")
    inputs = ViTImageProcessor.from_pretrained(folder)(photographs[0], return_tensors="pt")
    attentions = torch.cat(model(**inputs, output_attentions=True).attentions)
    assert image.grid == (ROWS, COLS)
    torch.testing.assert_close(image.attentions.float(), attentions, rtol=0, atol=5e-4)  # half precision below 1
    expected = pipeline("image-classification", model=str(folder), device="cpu")(photographs[0])
    assert [best["label"] for best in image.predictions] == [best["label"] for best in expected]
    assert [best["score"] for best in image.predictions] == pytest.approx(
        [best["score"] for best in expected], abs=1e-5
    )
    resized = np.asarray(photographs[0].resize((24, 16), Image.Resampling.BILINEAR), dtype=int)
    assert np.abs(image.pixels - resized).max() <= 2
    assert image.rollout.shape == image.class_attention[0].shape == (ROWS, COLS)
    assert image.class_attention.min() >= 0


@pytest.mark.parametrize(("number", "visible"), [(1, False), (2, True)])
def test_slider_without_a_choice_is_not_shown(number, visible):
    slider = app._slider(number, 1, "Layer")

    assert (slider.value, slider.visible) == (1, visible)


def test_class_whose_name_another_class_has_keeps_its_own_score(tmp_path):
    classifier = load_classifier(str(save_model(tmp_path / "model", id2label=dict(enumerate("aabbb")))), "cpu")
    explorer = app.Explorer(classifier, "names")
    best = explorer.first.predictions[0]

    _, predictions, *_ = explorer.show(explorer.first, *Selection())

    assert predictions[best["label"]] == best["score"] == max(predictions.values())


def test_all_numbers_of_a_regression_are_shown_in_their_order(tmp_path):
    classifier = load_classifier(str(save_model(tmp_path / "model", problem_type="regression")), "cpu")
    classifier.model.classifier.bias.data = torch.arange(5.0) * 10  # the last number is the largest
    explorer = app.Explorer(classifier, "numbers")

    _, predictions, *_, status = explorer.show(explorer.first, *Selection())

    assert re.fullmatch(", ".join(rf"{label}: [-.e\d]+" for label in LABELS), predictions)
    assert f"Predicted: {predictions}. " in unescape(status)


def test_greyscale_model_is_drawn(tmp_path, photographs):
    config = ViTScratchConfig(**TINY | {"num_channels": 1})
    ViTScratchForImageClassification(config).save_pretrained(tmp_path)
    size = {"height": 16, "width": 24}
    ViTImageProcessor(size=size, image_mean=[0.5], image_std=[0.5]).save_pretrained(tmp_path)
    classifier = pipeline("image-classification", str(tmp_path), device="cpu")
    image = inspect_image(classifier, photographs[0].convert("L"))

    assert pixels_of(draw_picture(image, Selection())).shape == (16, 24)


def test_other_models_are_refused(tmp_path, photographs):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(**sizes, image_size=32)).save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)

    with pytest.raises(UserError, match="must be a ViTScratchForImageClassification, got ViTForImageClass"):
        inspect_image(load_classifier(str(tmp_path), "cpu"), photographs[0])


# Pictures


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
@pytest.mark.parametrize("head", [0, 2])
def test_map_shows_what_the_selected_patch_reads(num_prefix_tokens, head):
    image = random_attention(num_prefix_tokens)

    html, sentence = draw_map(image, Selection("patch", layer=2, head=head, row=3, col=2))

    layer = image.attentions[1].float().numpy()
    weights = layer[head - 1] if head else layer.mean(axis=0)
    reads = weights[num_prefix_tokens + 2 * COLS + 1, num_prefix_tokens:].reshape(ROWS, COLS)
    np.testing.assert_array_equal(pixels_of(html), in_colors(reads))
    row, col = divmod(int(reads.argmax()), COLS)
    assert sentence.startswith("The patch in row 3, column 2 reads most from the patch in ")
    assert sentence.endswith(f" row {row + 1}, column {col + 1}: {100 * reads.max():.3g}%.")
    assert '<rect class="vit-outer" x="1" y="2" width="1" height="1"/>' in html
    assert f"layer 2, {'head 2' if head else 'mean of the heads'}" in html


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_maps_of_the_whole_image_show_its_vector(num_prefix_tokens):
    image = random_attention(num_prefix_tokens)

    maps = {view: pixels_of(draw_map(image, Selection(view))[0]) for view in ("image", "rollout", "class")}

    weights = image.attentions[0].float().numpy().mean(axis=0)
    reads = weights[0, 1:] if num_prefix_tokens else weights.mean(axis=0)
    np.testing.assert_array_equal(maps["image"], in_colors(reads.reshape(ROWS, COLS)))
    np.testing.assert_array_equal(maps["rollout"], in_colors(image.rollout))
    np.testing.assert_array_equal(maps["class"], in_colors(image.class_attention[0]))


def test_map_of_zeros_is_drawn():
    image = dataclasses.replace(random_attention(), class_attention=torch.zeros(1, ROWS, COLS))

    assert len(np.unique(pixels_of(draw_map(image, Selection("class"))[0]).reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize(("number", "outlined"), [(13, True), (8, True), (7, False), (1, False)])
def test_matrix_shows_the_first_tokens(number, outlined):
    image = random_attention()

    html = draw_matrix(image, Selection(layer=1, head=3, row=3, col=1, num_tokens=number))

    np.testing.assert_array_equal(pixels_of(html), in_colors(image.attentions[0, 2, :number, :number].float()))
    assert ('<rect class="vit-outer" x="0" y="7" ' in html) == outlined  # the class token, six patches, then this


def test_picture_shows_the_image_with_its_patches():
    image = random_attention()

    html = draw_picture(image, Selection(row=4, col=3))

    np.testing.assert_array_equal(pixels_of(html), image.pixels)
    assert "24 x 16 pixels in 3 x 4 patches; row 4, column 3 is outlined" in html
    assert '<rect class="vit-outer" x="2" y="3"' in html
    assert re.findall('d="(.*?)"', html) == ["M0 1H3", "M0 2H3", "M0 3H3", "M1 0V4", "M2 0V4"]


def test_names_of_classes_are_escaped():
    image = dataclasses.replace(random_attention(), predictions=[{"label": LABELS[2], "score": 0.75}])

    html = "".join(app.Explorer.draw(image, *Selection("class")))

    assert html.count("&lt;b&gt;cat&lt;/b&gt;") == 2
    assert "<b>cat" not in html


# Uploads


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "WEBP"), ("P", "GIF"), ("CMYK", "JPEG"), ("1", "TIFF"), ("LA", "PNG")],
)
def test_image_of_any_mode_becomes_rgb(mode, kind, photographs):
    image = photographs[0].convert(mode)

    opened = open_upload(file_of(image, kind))

    assert (opened.mode, opened.size) == ("RGB", image.size)
    difference = np.asarray(opened, dtype=int) - np.asarray(image.convert("RGB"), dtype=int)
    assert np.abs(difference).mean() < 8  # some kinds of files lose a little


def test_rotated_and_animated_images_are_opened(photographs):
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with a rotated camera

    turned = open_upload(file_of(photographs[0], "PNG", exif=exif))
    first = open_upload(file_of(photographs[0], "PNG", save_all=True, append_images=[photographs[1]]))

    assert turned.tobytes() == photographs[0].transpose(Image.Transpose.ROTATE_270).tobytes()
    assert first.tobytes() == photographs[0].tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be an image of type JPEG, PNG"),
        (b"a renamed text", "must be an image of type JPEG, PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be an image of type JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "must be an image of type JPEG, PNG"),
        (b"P6 1 1 255 abc", "must be an image of type JPEG, PNG"),  # which Pillow would open
        (png_of_size(9_000, 9_000), "9000x9000 are more than 64 million pixels"),
        (png_of_size(10_000, 10_000), "10000x10000 are more than 64 million pixels"),  # Pillow warns
        (png_of_size(60_000, 60_000), "with at most 64 megapixels"),  # Pillow refuses
        (file_of(Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)), "PNG"), "save it with 8 bits"),
        (png_of_size(7_000, 7_000), r"cannot be decoded as an image \(.+\)"),
    ],
    ids=["empty", "text", "svg", "eps", "ppm", "large", "larger", "bomb", "16 bits", "damaged"],
)
def test_hostile_file_is_refused_in_a_sentence(content, message):
    with pytest.raises(UserError, match=message):
        open_upload(content)


# Examples and the command line


def test_examples_fit_the_model():
    digits, photographs = load_examples(["0", "1"]), load_examples(["ant", "bee"])

    assert {image.size for image, _ in digits} == {(8, 8)}
    assert [name for _, name in photographs] == ["temple", "flower"]


def error_of(capsys, *arguments):
    """Return the line that a refused command prints."""
    assert vit_scratch.main(["explore", *map(str, arguments), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("vit-scratch explore: error: ")


def test_missing_gradio_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, app.__name__)

    assert error_of(capsys, tmp_path) == 'The explorer needs Gradio: pip install -e ".[explorer]"'


def test_port_that_no_machine_has_is_refused(capsys, tmp_path):
    assert error_of(capsys, tmp_path, "--port", 70000) == "--port must be from 1 to 65535, got 70000."


def test_mistakes_are_reported_in_a_line(tmp_path, capsys):
    model = save_model(tmp_path / "model")

    assert "Give the folder of a saved model" in error_of(capsys, tmp_path / "none")
    assert error_of(capsys, model, "--write_space", model) == f"--write_space must be a new folder, got {model}."


def test_taken_port_is_reported_in_a_line(tmp_path, monkeypatch, capsys):
    class Page:
        def queue(self, **options):
            return self

        def launch(self, **options):
            raise OSError("Cannot find empty port in range: 80-80.")

    monkeypatch.setattr(app, "build_page", lambda explorer: Page())

    assert error_of(capsys, save_model(tmp_path), "--port", 80) == "Cannot find empty port in range: 80-80."


# The page


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def started(arguments, folder, **environment):
    """Start a server process, and return it with its address once it answers."""
    port = free_port()
    environment = (
        os.environ | {"GRADIO_SERVER_PORT": str(port), "GRADIO_TEMP_DIR": str(folder / "uploads")} | environment
    )
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            assert httpx.get(url, timeout=30).status_code == 200
            return server, url
        except httpx.TransportError:
            assert server.poll() is None, (folder / "log.txt").read_text()
            assert time.monotonic() < deadline, (folder / "log.txt").read_text()
            time.sleep(0.1)


@contextmanager
def serving(folder, setting):
    """Serve a page with one changed constant; yield its process and its address."""
    save_model(folder / "model")
    code = f"from hf_vit_scratch.interpretation.explorer import app; app.{setting}; app.main(['model'])"
    server, url = started(["-c", code], folder)
    yield server, url
    server.terminate()
    server.wait(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Yield the address of a page that keeps the images of two visitors."""
    with serving(tmp_path_factory.mktemp("served"), "KEPT_VISITORS = 2") as (_, url):
        yield url


def ask(url, content, *selection):
    """Return what the only public endpoint of the page answers to a file, without markup."""
    with httpx.Client(base_url=f"{url}/gradio_api", timeout=120) as client:
        (path,) = client.post("upload", files={"files": ("image.jpg", content)}).raise_for_status().json()
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        asked = client.post("call/explore", json={"data": [file, *(selection or ("patch", 1, 0, 1, 1, 4))]})
        if asked.status_code == 503:
            return asked.json()["detail"]
        events = client.get(f"call/explore/{asked.raise_for_status().json()['event_id']}").text
    *_, (kind, last) = re.findall(r"event: (\w+)\ndata: (.*)", events)
    data = json.loads(last)
    assert kind in ("complete", "error")
    return re.sub("<.*?>", "", data[-1] if kind == "complete" else data["error"])


@pytest.mark.parametrize(
    ("path", "message"),
    [(str(Path(__file__).resolve()), "null"), ("http://example.invalid/x.png", '"Give a file, not an address."')],
    ids=["local", "address"],
)
def test_nothing_but_an_upload_is_read(path, message, served):
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    with httpx.Client(base_url=f"{served}/gradio_api", timeout=60) as client:
        event = client.post("call/explore", json={"data": [file, "patch", 1, 0, 1, 1, 4]}).json()["event_id"]

        assert f'event: error\ndata: {{"error": {message}' in client.get(f"call/explore/{event}").text
        assert client.get(f"file={path}").status_code in (403, 404)


def test_large_file_is_refused_while_it_arrives(served):
    content = bytes(MAX_FILE_BYTES + 1)

    answer = httpx.post(f"{served}/gradio_api/upload", files={"files": ("image.jpg", content)}, timeout=60)

    assert answer.status_code == 413


def test_selection_outside_the_model_is_refused(served, photographs):
    content = file_of(photographs[0], "JPEG")

    assert ask(served, content, "patch", 2, 4, 4, 3, 13).startswith("Predicted: ")
    assert "maximum value 2" in ask(served, content, "patch", 3, 4, 4, 3, 13)
    assert "minimum value 1" in ask(served, content, "patch", 2, 4, 0, 3, 13)
    assert "not in the list of choices" in ask(served, content, "patch", 2, 5, 4, 3, 13)


@pytest.fixture
def browser(tmp_path):
    if not (Path(CHROMIUM).exists() and Path(CHROMEDRIVER).exists()):
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--window-size=1300,1400"),
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


class Page:
    """The actions of a user on the page, and what the user sees."""

    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)
        self.until(lambda: self.all("#matrix img"))

    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: condition())

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        (found,) = self.all(selector)
        return found

    def text(self, selector):
        return self.driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)

    def picture(self, name):
        """Return the data of a picture on the screen."""
        return self.driver.execute_script("return document.querySelector(arguments[0]).src", f"#{name} img")

    def changes(self, act, *names):
        """Act, then wait until all of these pictures have changed."""
        before = {name: self.picture(name) for name in names}
        act()
        self.until(lambda: all(self.picture(name) != before[name] for name in names))

    def upload(self, path):
        self.until(lambda: self.all("input[type=file]"))
        self.one("input[type=file]").send_keys(str(path))

    def says(self, status):
        self.until(lambda: status in self.text("#status"))

    def warns(self, message):
        self.until(lambda: any(message in toast.text for toast in self.all("[class*=toast]")))

    def click_patch(self, name, row, col):
        from selenium.webdriver import ActionChains

        stack = self.one(f"#{name} .vit-stack")
        width, height = stack.size["width"], stack.size["height"]
        x, y = width * ((col - 0.5) / COLS - 0.5), height * ((row - 0.5) / ROWS - 0.5)
        ActionChains(self.driver).move_to_element_with_offset(stack, round(x), round(y)).click().perform()

    def radio(self, label):
        (found,) = (radio for radio in self.all("input[type=radio]") if label in radio.accessible_name)
        return found

    def slide(self, label, *keys):
        from selenium.webdriver.common.keys import Keys

        slider = self.one(f'input[type=range][aria-label$="{label}"]')
        slider.send_keys(*(getattr(Keys, key) for key in keys))


def test_page_in_a_browser(served, browser, photographs, tmp_path):
    page = Page(browser, served)
    assert "What the model model attends to" in page.text("h1")

    # An image
    photographs[1].save(tmp_path / "flower.jpg")
    page.changes(lambda: page.upload(tmp_path / "flower.jpg"), "picture", "map", "matrix")
    page.says("Predicted: ")
    assert page.text("#predictions").count("%") == 5
    flower = page.picture("picture")

    # A click, in the image and in the map
    page.changes(lambda: page.click_patch("picture", 4, 3), "map")
    page.says("The patch in row 4, column 3 reads")
    page.until(lambda: page.one('input[type=number][aria-label$="Row of the patch"]').get_attribute("value") == "4")
    page.changes(lambda: page.click_patch("map", 1, 2), "map")
    page.says("The patch in row 1, column 2 reads")
    page.until(lambda: "row 1, column 2 is outlined" in page.one("#picture img").accessible_name)

    # The keyboard
    page.changes(lambda: page.slide("Column of the patch", "ARROW_RIGHT"), "map")
    page.says("The patch in row 1, column 3 reads")
    page.changes(lambda: page.slide("Layer", "ARROW_LEFT"), "map", "matrix")
    page.until(lambda: "layer 1, mean of the heads" in page.text("#map"))
    page.changes(lambda: page.slide("Tokens", "HOME", "ARROW_RIGHT"), "matrix")
    page.until(lambda: "the first 2 of 13 tokens" in page.text("#matrix"))
    for label in ("What the whole image's vector reads", "class attention", "rollout"):
        page.changes(page.radio(label).click, "map")
    page.changes(page.all("#examples button")[0].click, "picture", "map")
    page.changes(lambda: page.upload(tmp_path / "flower.jpg"), "picture", "map")
    page.changes(page.all("#examples button")[0].click, "picture", "map")  # the same example once more

    # A hostile file, after which the page goes on
    (tmp_path / "text.jpg").write_text("a renamed text")
    page.upload(tmp_path / "text.jpg")
    page.warns("must be an image of type JPEG")
    (tmp_path / "bomb.png").write_bytes(png_of_size(60_000, 60_000))
    page.upload(tmp_path / "bomb.png")
    page.warns("with at most 64 megapixels")
    (tmp_path / "large.jpg").write_bytes(bytes(MAX_FILE_BYTES + 1))
    page.upload(tmp_path / "large.jpg")
    page.warns("maximum allowed size")
    page.changes(lambda: page.upload(tmp_path / "flower.jpg"), "picture", "map")
    assert page.picture("picture") == flower

    # The images of other visitors replace its own, and the page goes on
    for _ in range(3):
        ask(served, (tmp_path / "flower.jpg").read_bytes())
    page.click_patch("picture", 3, 1)
    page.warns("This image is no longer in memory. Upload or choose it again.")
    page.changes(page.all("#examples button")[0].click, "picture", "map")

    # Everything has a name for a screen reader
    shown = [element for element in page.all("img, input, select, textarea, button, a") if element.is_displayed()]
    assert len(shown) > 20
    assert [element.get_attribute("outerHTML") for element in shown if not element.accessible_name.strip()] == []
    assert page.one("[role=status][aria-live=polite] .vit-status").is_displayed()

    # No other machine was contacted, and no error was logged
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]["request"]["url"] for message in messages if message["method"].endswith("WillBeSent")
    ]
    hosts = {urlsplit(url).hostname for url in requests if url.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}
    # Gradio asks for the progress of an upload, which a fast one has ended before. The browser logs the address,
    # and Gradio may log the word "Response" as well.
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [error for error in errors if "upload_progress" not in error and not error.endswith(" Response")] == []


# The Space


@pytest.mark.slow
def test_space_holds_all_it_needs_and_runs(tmp_path, capsys):
    model, space = save_model(tmp_path / "pets"), tmp_path / "space"
    (model / "training_args.bin").touch()

    assert vit_scratch.main(["explore", str(model), "--write_space", str(space)]) == 0
    shutil.rmtree(model)

    assert f"{space} is written." in capsys.readouterr().out
    saved = {path.name for path in (space / "models" / "pets").iterdir() if path.suffix != ".py"}
    assert saved == {"config.json", "model.safetensors", "preprocessor_config.json"}
    card = (space / "README.md").read_text()
    assert card.startswith('---\ntitle: "pets"\n')
    assert re.search(
        r'^sdk: gradio\nsdk_version: \d+\.\d+\.\d+\npython_version: "3\.\d+"\napp_file: app.py\n', card, re.M
    )
    requirements = (space / "requirements.txt").read_text().split("\n")
    assert any(re.match("torch[<>]", line) for line in requirements)
    assert not any("extra" in line or "gradio" in line for line in requirements)
    code = "import hf_vit_scratch, runpy; print(hf_vit_scratch.__file__, flush=True); runpy.run_path('app.py')"
    server, url = started(["-c", code], space)
    try:
        config = httpx.get(f"{url}/config").text
        assert "temple" in config
        assert "What the model pets attends to" in config
        assert (space / "log.txt").read_text().startswith(str(space / "hf_vit_scratch"))
    finally:
        server.terminate()
        server.wait(30)
