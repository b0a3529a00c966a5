"""Files that pretend to be images: each is decoded or named, none ends the process or fills the memory."""

import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import struct
import sys
import zlib
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from test_explorer import save_model
from transformers import ViTImageProcessor

from hf_vit_scratch.data import images as image_files
from hf_vit_scratch.data import sources
from hf_vit_scratch.data import splits as data_splits
from hf_vit_scratch.data.augmentation import Augmentation
from hf_vit_scratch.data.dataset import BatchTransform
from hf_vit_scratch.data.images import decode_image
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.data.streaming import ImageClassificationStream
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import predict
from hf_vit_scratch.interpretation.explorer.app import open_upload

pytestmark = pytest.mark.slow

NUMBER = 1000
GIB = 2**30
EXIF_ROTATED = Image.Exif()
EXIF_ROTATED[0x0112] = 6


def encoded(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def whole_images():
    """Small images of all modes and kinds, by a name."""
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 4), dtype=np.uint8)
    rgb = Image.fromarray(pixels[..., :3])
    found = {}
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "F"):
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else rgb.convert(mode)
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000"):
            try:
                found[f"{mode}.{kind}"] = encoded(image, kind)
            except (OSError, ValueError, KeyError):
                continue  # this kind has no such mode
    frames = [Image.fromarray(np.roll(pixels[..., :3], shift, 0)) for shift in range(5)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        found[f"animated.{kind}"] = encoded(rgb, kind, save_all=True, append_images=frames)
    found["rotated.JPEG"] = encoded(rgb, "JPEG", exif=EXIF_ROTATED)
    return found


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, content=b"", extra=b""):
    """A PNG that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def crafted():
    """Files that were made to do harm, by a name."""
    text = zlib.compress(b"0" * 200_000_000, 9)
    return {
        "empty": b"",
        "text": b"<html>no image at all</html>" * 20,
        "script": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n%%EndComments\n(harm) print\n%%EOF\n",
        "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "bomb.png": png(30_000, 30_000, b"\0" * 10_000_000),
        "absurd.png": png(2**31 - 1, 2**31 - 1),
        "flat.png": png(2**31 - 1, 1),
        "nothing.png": png(0, 0),
        "text_bomb.png": png(4, 4, b"\0" * 68, chunk(b"zTXt", b"comment\0\0" + text)),
        "profile_bomb.png": png(4, 4, b"\0" * 68, chunk(b"iCCP", b"profile\0\0" + text)),
        "screen.gif": b"GIF89a\xff\xff\xff\xff\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;",
        "huge.bmp": b"BM" + struct.pack("<IHHIIiiHH", 2**31 - 1, 0, 0, 54, 40, 2**30, 2**30, 1, 24) + b"\0" * 24,
        "huge.ppm": b"P6 100000 100000 255\n",
        "size.tif": struct.pack("<2sHIHHHIIHHIII", b"II", 42, 8, 2, 256, 4, 1, 2**31 - 1, 257, 4, 1, 2**31 - 1, 0),
    }  # fmt: skip


def hostile(number):
    """`number` files by name: the crafted ones, whole images, and damaged ones."""
    draws = random.Random(1)
    whole = whole_images()
    found = crafted() | {f"whole_{name}": content for name, content in whole.items()}
    while len(found) < number:
        name = draws.choice(sorted(whole))
        content = bytearray(whole[name])
        if draws.random() < 0.3:
            content = content[: draws.randrange(len(content))]
        else:  # mostly in the header, where sizes and types are
            for _ in range(draws.randint(1, 8)):
                end = 60 if draws.random() < 0.7 else len(content)
                content[draws.randrange(min(end, len(content)))] = draws.randrange(256)
        found[f"damaged_{len(found)}_{name}"] = bytes(content)
    return found


def peak_of(function, *args):
    """What a function returns in a process of its own, and the bytes by which its memory grew at most."""

    def work(sender):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open(os.devnull, "w") as silent:
            sys.stdout = sys.stderr = silent
            result = function(*args)
        sender.send((result, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender,))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    assert process.exitcode == 0, process.exitcode  # a crash has the number of its signal, negative
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of two classes with the files, and which of them Pillow alone can decode."""
    root = tmp_path_factory.mktemp("hostile")
    for number, (name, content) in enumerate(hostile(NUMBER).items()):
        path = root / ("even", "odd")[number % 2] / f"{number:04}_{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return root


def kept_and_named(root):
    """The names that the data path keeps, and those that it reports."""
    reported = []
    data_splits.logger.warning = lambda text, *values: reported.append(text % values)
    splits = load_splits(str(root), corrupt_images="skip", validation_fraction=0.2)
    rows = [row for part in splits.values() for row in part.cast_column("image", ImageFeature(decode=False))]
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
    for row in rows:
        pixels = processor(decode_image(row["image"], ""), return_tensors="pt")["pixel_values"]
        assert pixels.isfinite().all()
    named = [Path(text.strip().partition(" cannot be decoded")[0]).name for text in reported if "cannot" in text]
    return sorted(Path(row["image"]["path"]).name for row in rows), sorted(named)


def test_data_path_decodes_or_names_each_file(files, figure):
    (kept, named), peak = peak_of(kept_and_named, files)

    assert sorted([*kept, *named]) == sorted(path.name for path in files.rglob("*.jpg"))
    assert min(len(kept), len(named)) > NUMBER / 10
    assert peak < GIB
    figure(f"{NUMBER:,} hostile images, data path: {len(kept)} decoded, {len(named)} named, {peak / 2**20:.0f} MiB")


def predicted(model, root, output):
    return predict.main([str(model), str(root), "--output", str(output), "--device", "cpu"])


def test_predict_classifies_or_names_each_file(files, tmp_path, figure):
    save_model(tmp_path / "model")
    status, peak = peak_of(predicted, tmp_path / "model", files, tmp_path / "predictions.jsonl")

    results = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert status == 1
    assert len(results) == NUMBER
    broken = [result for result in results if "error" in result]
    assert min(len(broken), NUMBER - len(broken)) > NUMBER / 10
    assert all(("error" in result) != ("predictions" in result) for result in results)
    assert all(Path(result["image"]).name in result["error"] for result in broken)
    assert peak < GIB
    figure(
        f"{NUMBER:,} hostile images, predict: {NUMBER - len(broken)} classified, {len(broken)} named, "
        f"{peak / 2**20:.0f} MiB"
    )


def opened(root):
    """How many files the explorer opens, and how many it refuses."""
    counts = [0, 0]
    for path in sorted(root.rglob("*.jpg")):
        try:
            assert open_upload(path.read_bytes()).mode == "RGB"
            counts[0] += 1
        except UserError as error:
            counts[1] += str(error).endswith(".")
    return counts


def test_explorer_opens_or_refuses_each_file(files, figure):
    (good, bad), peak = peak_of(opened, files)

    assert good + bad == NUMBER
    assert min(good, bad) > NUMBER / 10
    assert peak < GIB
    figure(f"{NUMBER:,} hostile images, explorer: {good} opened, {bad} refused, {peak / 2**20:.0f} MiB")


def largest(path):
    """Decode and resize the largest image that is accepted."""
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
    return processor(decode_image({"path": str(path), "bytes": None}, ""), return_tensors="pt")["pixel_values"].shape


@pytest.mark.parametrize("mode", ["RGBA", "CMYK", "L"])
def test_largest_image_that_is_accepted_stays_below_one_gib(mode, tmp_path, figure):
    side = int(image_files.MAX_PIXELS**0.5)
    path = tmp_path / "image"
    peak_of(lambda: Image.new(mode, (side, side)).save(path, "TIFF", compression="tiff_lzw", exif=EXIF_ROTATED))

    shape, peak = peak_of(largest, path)

    assert shape == (1, 3, 8, 8)
    assert peak < GIB
    figure(f"largest image, {side}x{side} {mode}, rotated: {peak / 2**20:.0f} MiB")


def test_more_pixels_than_fit_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(image_files, "MAX_PIXELS", 100)
    good, bad = (encoded(Image.new("RGB", (10, height)), "PNG") for height in (10, 11))
    assert decode_image({"path": None, "bytes": good}, "x").size == (10, 10)
    with pytest.raises(UserError, match=r"x cannot be decoded .*10x11 are more than 0\.0001 million pixels"):
        decode_image({"path": None, "bytes": bad}, "x")


def test_file_that_is_a_program_is_not_run(monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("it was run"))
    with pytest.raises(UserError, match=r"x cannot be decoded .*EPS files are not supported"):
        decode_image({"path": None, "bytes": crafted()["script"]}, "x")


# Files that are not the dataset's


@pytest.mark.parametrize("what", ["image", "class"])
@pytest.mark.parametrize("labelled", [True, False])
def test_link_that_leads_out_of_the_folder_is_refused_unless_allowed(what, labelled, class_folders, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    if what == "image":
        image = class_folders / "flower" / "00.jpg"
        image.rename(tmp_path / "elsewhere" / "secret.jpg")
        image.symlink_to(tmp_path / "elsewhere" / "secret.jpg")
    else:
        (class_folders / "flower").rename(tmp_path / "elsewhere" / "flower")
        (class_folders / "flower").symlink_to(tmp_path / "elsewhere" / "flower")
    with pytest.raises(UserError, match=r"leads to .*elsewhere.*\. If this is intended, add --follow_links true"):
        load_splits(str(class_folders), labelled=labelled)
    splits = load_splits(str(class_folders), labelled=labelled, follow_links=True)
    assert sum(map(len, splits.values())) == 24


def test_links_inside_of_the_folder_and_to_it_are_followed(class_folders, tmp_path):
    image = class_folders / "flower" / "00.jpg"
    image.rename(class_folders / "temple" / "original.jpg")
    image.symlink_to("../temple/original.jpg")
    (tmp_path / "link").symlink_to(class_folders)
    assert sum(map(len, load_splits(str(tmp_path / "link")).values())) == 25


def write_parquet(file, images):
    """Rows as they are given: `datasets` would put the content of the files into them."""
    features = Features({"image": ImageFeature(), "label": datasets.ClassLabel(names=["a", "b"])})
    labels = [number % 2 for number in range(len(images))]
    pyarrow.parquet.write_table(
        Dataset.from_dict({"image": images, "label": labels}, features=features).data.table, file
    )


def test_parquet_file_takes_in_no_file_from_elsewhere_unless_allowed(tmp_path, photographs):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, path in (("good", folder / "own.png"), ("bad", tmp_path / "other.png")):
        photographs[0].resize((8, 8)).save(path)
        write_parquet(folder / f"{name}.parquet", [{"path": str(path), "bytes": None}] * 40)

    splits = load_splits(str(folder / "good.parquet"), near_duplicates="ignore")
    assert sum(map(len, splits.values())) == 40
    with pytest.raises(UserError, match=r"lies outside of .*data\. If this is intended, add --follow_links"):
        load_splits(str(folder / "bad.parquet"))
    splits = load_splits(str(folder / "bad.parquet"), follow_links=True, near_duplicates="ignore")
    assert sum(map(len, splits.values())) == 40


def test_stream_that_skips_broken_images_opens_no_file_of_this_machine(tmp_path):
    (tmp_path / "secret.txt").write_text("no image")
    feature = Features({"image": ImageFeature(decode=False), "label": datasets.ClassLabel(names=["a", "b"])})
    images = [{"path": str(tmp_path / "secret.txt"), "bytes": None}] * 4
    rows = Dataset.from_dict({"image": images, "label": [0, 1] * 2}, features=feature).to_iterable_dataset()
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
    transform = BatchTransform(processor, [Augmentation((8, 8))])

    with pytest.raises(UserError, match="to stream, the images must be in the rows themselves"):
        next(iter(ImageClassificationStream(rows, transform, batch_size=2, stage_of_batch=[0], skip_corrupt=True)))


@pytest.mark.parametrize(("split", "place"), [("train", 0), ("train", 39), ("validation", 39)])
def test_stream_takes_in_no_file_of_this_machine(split, place, tmp_path, photographs, monkeypatch):
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # five seconds after each pass
    photographs[0].resize((8, 8)).save(tmp_path / "secret.png")
    content = (tmp_path / "secret.png").read_bytes()
    images = {name: [{"path": None, "bytes": content}] * 40 for name in ("train", "validation")}
    images[split][place] = {"path": str(tmp_path / "secret.png"), "bytes": None}
    (tmp_path / "data").mkdir()
    for name, rows in images.items():
        write_parquet(tmp_path / "data" / f"{name}.parquet", rows)

    def read():
        rows = load_splits(str(tmp_path / "data"), streaming=True)["train"]
        processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
        stages, order = [Augmentation((8, 8))], {"batch_size": 5, "stage_of_batch": [0], "buffer_size": 5}
        return list(itertools.islice(ImageClassificationStream(rows, BatchTransform(processor, stages), **order), 16))

    with pytest.raises(UserError, match="to stream, the images must be in the rows themselves"):
        read()


@pytest.mark.parametrize("path", ["/etc/secret.png", "../../secret.png"])
def test_dataset_of_the_hub_takes_in_no_file_of_this_machine(path, monkeypatch):
    features = Features({"image": ImageFeature(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": [{"path": path, "bytes": None}] * 4, "label": [0, 1, 0, 1]}, features=features)
    monkeypatch.setattr(sources, "load_dataset", lambda *args, **kwargs: datasets.DatasetDict(train=rows))
    with pytest.raises(UserError, match=r"outside of .*owner/name refers to a file that does not belong to it"):
        load_splits("owner/name")


def test_dataset_of_the_hub_has_its_own_files(monkeypatch, tmp_path, photographs):
    monkeypatch.setattr(sources, "HF_DATASETS_CACHE", str(tmp_path))
    photographs[0].save(tmp_path / "image.png")
    content = (tmp_path / "image.png").read_bytes()
    features = Features({"image": ImageFeature(), "label": datasets.ClassLabel(names=["a", "b"])})
    images = [{"path": str(tmp_path / "image.png"), "bytes": None}, {"path": "name.png", "bytes": content}, None] * 4
    rows = Dataset.from_dict({"image": images, "label": [0, 1] * 6}, features=features)
    monkeypatch.setattr(sources, "load_dataset", lambda *args, **kwargs: datasets.DatasetDict(train=rows))
    assert sum(map(len, load_splits("owner/name", near_duplicates="ignore").values())) == 12
