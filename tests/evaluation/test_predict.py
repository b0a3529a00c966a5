"""The command line that classifies files, folders and globs of images."""

import csv
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import TINY, randomize_
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTImageProcessor,
    pipeline,
)

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import predict
from hf_vit_scratch.evaluation.predict import find_images
from hf_vit_scratch.speed import optimize as speed

LABELS = ["ant", "bee, wild", "cat", "dog", "eel"]


def save_image_processor(folder):
    ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True).save_pretrained(folder)


@pytest.fixture
def saved(tmp_path):
    """Saves an image classifier with random weights, and returns its folder."""

    def save(**fields):
        config = ViTScratchConfig(**TINY | {"id2label": dict(enumerate(LABELS))} | fields)
        randomize_(ViTScratchForImageClassification(config), 0.2).save_pretrained(tmp_path / "model")
        save_image_processor(tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.fixture
def mixed_images(tmp_path, photographs):
    """Nine images of all kinds, no two alike."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with a rotated camera
    for number, mode in enumerate(("RGB", "L", "RGBA", "P", "CMYK", "LA", "1")):
        image = photographs[number % 2].crop((50 * number, 0, 50 * number + 90, 60)).convert(mode)
        image.save(folder / f"{number}.tiff")
    photographs[0].resize((90, 60)).save(folder / "7.jpg", exif=exif)
    photographs[1].resize((200, 9)).save(folder / "8.gif")
    return folder


def run(*arguments):
    return vit_scratch.main(["predict", *map(str, arguments), "--device", "cpu"])


def results_of(capsys, *arguments):
    """The exit code, the results, and the lines on standard error."""
    code = run(*arguments)
    printed = capsys.readouterr()
    return code, [json.loads(line) for line in printed.out.splitlines()], printed.err.splitlines()


def error_of(capsys, *arguments):
    """The one line that a refused command prints."""
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("vit-scratch predict: error: ")


def plain_predictions(model, path):
    """Those of transformers' own pipeline on one image."""
    with Image.open(path) as image:  # given the path, it leaves some kinds of files open
        return pipeline("image-classification", model=str(model), device="cpu")(image)


def assert_same_predictions(actual, expected):
    assert [best["label"] for best in actual] == [best["label"] for best in expected]
    assert [best["score"] for best in actual] == pytest.approx([best["score"] for best in expected], abs=1e-5)


# Predictions


@pytest.mark.parametrize(
    "options",
    [["--batch_size", 1], ["--batch_size", 4], ["--batch_size", 4, "--num_workers", 1], []],
    ids=["single", "batches", "worker", "default"],
)
def test_predictions_are_those_of_the_plain_pipeline_on_each_image(options, saved, mixed_images, capsys):
    model = saved()
    paths = sorted(map(str, mixed_images.iterdir()))

    code, results, errors = results_of(capsys, model, mixed_images, *options)

    assert (code, errors) == (0, [])
    assert [result["image"] for result in results] == paths
    assert len({round(result["predictions"][0]["score"], 5) for result in results}) == len(
        paths
    )  # none could be swapped
    for path, result in zip(paths, results, strict=True):
        assert_same_predictions(result["predictions"], plain_predictions(model, path))


@pytest.mark.parametrize(
    ("problem_type", "scores_of"),
    [
        ("single_label_classification", lambda logits: logits.softmax(-1)),
        ("multi_label_classification", torch.sigmoid),
    ],
    ids=["softmax", "sigmoid"],
)
def test_scores_are_those_of_the_kind_of_problem(problem_type, scores_of, saved, mixed_images, capsys):
    folder = saved(problem_type=problem_type)
    model = ViTScratchForImageClassification.from_pretrained(folder)
    with Image.open(mixed_images / "0.tiff") as image, torch.no_grad():
        pixels = ViTImageProcessor.from_pretrained(folder)(image, return_tensors="pt")
        scores = scores_of(model(**pixels).logits[0])

    _, results, _ = results_of(capsys, folder, mixed_images / "0.tiff")

    expected = [{"label": LABELS[place], "score": float(scores[place])} for place in scores.argsort(descending=True)]
    assert_same_predictions(results[0]["predictions"], expected)


def test_numbers_keep_the_order_of_the_model(saved, mixed_images, capsys):
    names = ("width", "height", "depth", "age", "weight")
    folder = saved(problem_type="regression", num_labels=5, id2label=dict(enumerate(names)))

    _, results, _ = results_of(capsys, folder, mixed_images, "--top_k", "5")

    values = [[number["score"] for number in result["predictions"]] for result in results]
    assert any(numbers != sorted(numbers, reverse=True) for numbers in values)
    assert {tuple(number["label"] for number in result["predictions"]) for result in results} == {names}


def test_name_of_one_image_may_be_given_without_a_list(mixed_images):
    assert find_images(str(mixed_images / "0.tiff")) == [str(mixed_images / "0.tiff")]


def test_all_numbers_are_given(saved, mixed_images):
    names = [f"number {place}" for place in range(7)]
    folder = saved(problem_type="regression", num_labels=7, id2label=dict(enumerate(names)))
    classifier = predict.load_classifier(str(folder))

    (result,) = predict.predict(classifier, [str(mixed_images / "0.tiff")])

    assert [prediction["label"] for prediction in result["predictions"]] == names


@pytest.mark.parametrize("names", [("score_2", "label_1"), ("age", "error")])
def test_numbers_may_be_called_as_other_columns_are(names, saved, mixed_images, tmp_path, capsys):
    folder = saved(problem_type="regression", num_labels=2, id2label=dict(enumerate(names)))
    _, results, _ = results_of(capsys, folder, mixed_images / "0.tiff")

    run(folder, mixed_images / "0.tiff", "--output", tmp_path / "a.csv")

    with (tmp_path / "a.csv").open(encoding="utf-8") as file:
        table = csv.DictReader(file)
        (row,) = table
    assert len({*table.fieldnames}) == len(table.fieldnames)
    expected = {prediction["label"]: prediction["score"] for prediction in results[0]["predictions"]}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_regression_gives_what_the_plain_pipeline_gives(saved, mixed_images, capsys):
    folder = saved(problem_type="regression", num_labels=1, id2label={0: "age"})

    _, results, _ = results_of(capsys, folder, mixed_images / "0.tiff")

    assert_same_predictions(results[0]["predictions"], plain_predictions(folder, mixed_images / "0.tiff"))


@pytest.mark.parametrize(("top_k", "num_given"), [(1, 1), (3, 3), (99, 5)])
def test_at_most_top_k_classes_are_returned(top_k, num_given, saved, mixed_images, capsys):
    _, results, _ = results_of(capsys, saved(), mixed_images, "--top_k", top_k)

    assert {len(result["predictions"]) for result in results} == {num_given}


# Broken images


def break_image(path, how):
    whole = path.read_bytes()
    path.write_bytes({"text": b"a renamed text", "truncated": whole[: len(whole) // 2], "zero_bytes": b""}[how])


@pytest.mark.parametrize("how", ["text", "truncated", "zero_bytes"])
def test_broken_image_is_named_and_passed_over(how, saved, class_folders, capsys):
    broken = class_folders / "temple" / "03.jpg"
    break_image(broken, how)

    code, results, errors = results_of(capsys, saved(), class_folders, "--batch_size", 5)

    assert code == 1
    assert [result["image"] for result in results if "error" in result] == [str(broken)]
    assert len([result for result in results if "predictions" in result]) == 23
    (result,) = (result for result in results if "error" in result)
    assert re.fullmatch(rf"{broken} cannot be decoded as an image \(.+\)\.", result["error"])
    assert errors == [
        f"vit-scratch predict: {result['error']}",
        "vit-scratch predict: 1 of 24 images cannot be decoded",
    ]


def test_decompression_bomb_is_a_broken_image(saved, mixed_images, photographs, monkeypatch, capsys):
    photographs[0].save(mixed_images / "bomb.png")  # of 640x427 pixels; the others have 5400 at most
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)

    code, results, _ = results_of(capsys, saved(), mixed_images)

    assert code == 1
    assert "decompression bomb" in results[-1]["error"]
    assert ["error" in result for result in results] == [False] * 9 + [True]


def test_images_around_broken_ones_keep_their_own_predictions(saved, mixed_images, capsys):
    model = saved()
    paths = sorted(mixed_images.iterdir())
    for number in (0, 3, 4, 5, 8):  # the first of a batch, the last, and a whole batch of three
        break_image(paths[number], "text")

    code, results, _ = results_of(capsys, model, mixed_images, "--batch_size", 3)

    assert code == 1
    assert [result["image"] for result in results] == list(map(str, paths))
    assert ["error" in result for result in results] == [number in (0, 3, 4, 5, 8) for number in range(9)]
    for number in (1, 2, 6, 7):
        assert_same_predictions(results[number]["predictions"], plain_predictions(model, paths[number]))


# Which images


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working folder with files, as if they were images."""
    monkeypatch.chdir(tmp_path)
    for name in ("in/b.png", "in/a.JPG", "in/deep/er/c.tiff", "in/notes.txt", "in/.d.png", "in/e[1].png", "raw"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("in/folder.png").mkdir()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["in"], ["in/a.JPG", "in/b.png", "in/deep/er/c.tiff", "in/e[1].png"]),
        (["in/*"], ["in/a.JPG", "in/b.png", "in/e[1].png"]),
        (["in/**/*.tiff", "in/?.png"], ["in/deep/er/c.tiff", "in/b.png"]),
        (["raw", "in/notes.txt"], ["raw", "in/notes.txt"]),
        (["in/e[1].png"], ["in/e[1].png"]),
        (["in/b.png", "in/?.*", "in/deep"], ["in/b.png", "in/a.JPG", "in/deep/er/c.tiff"]),
    ],
    ids=["folder", "glob", "globs", "any_suffix", "brackets", "each_once"],
)
def test_names_expand_to_images(names, found, tree):
    assert find_images(names) == found


@pytest.mark.parametrize("name", ["in/*.gif", "in/nothing.png", "in/folder.png"])
def test_name_without_an_image_is_refused(name, tree):
    with pytest.raises(UserError, match=f"^{re.escape(name)}: no image found"):
        find_images(["in", name])


def test_folder_that_cannot_be_read_is_named(tmp_path, mixed_images, monkeypatch, caplog):
    scandir = os.scandir

    def refusing(path):  # root may read everything
        if str(path) == str(mixed_images):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    monkeypatch.setattr(os, "scandir", refusing)

    assert find_images([str(tmp_path)]) == [str(tmp_path / "one.png")]
    assert caplog.messages == [f"{mixed_images} cannot be read: Permission denied. Its images are left out."]


def test_table_is_written_into_the_home_folder(saved, mixed_images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert run(saved(), mixed_images, "--output=~/table.csv") == 0
    assert (tmp_path / "table.csv").is_file()


def test_images_are_looked_for_before_the_model(tree, capsys):
    assert error_of(capsys, "no/such/model", "in/*.gif").startswith("in/*.gif: no image found")


# Output


def test_class_called_error_is_no_error(saved, mixed_images, tmp_path):
    model = saved(id2label=dict(enumerate(["ok", "error", "cat", "dog", "eel"])))

    assert run(model, mixed_images, "--output", tmp_path / "table.csv") == 0

    with (tmp_path / "table.csv").open() as file:
        assert {row["error"] for row in csv.DictReader(file)} == {""}


def test_file_whose_name_begins_like_a_home_folder_is_found(saved, mixed_images, capsys, monkeypatch):
    (mixed_images / "0.tiff").rename(mixed_images / "~nobody.tiff")
    model = saved()
    monkeypatch.chdir(mixed_images)

    code, (result,), _ = results_of(capsys, model, "~nobody.tiff")

    assert (code, result["image"]) == (0, "~nobody.tiff")


def test_table_has_one_row_per_image_and_a_column_of_errors(saved, mixed_images, tmp_path, capsys):
    break_image(mixed_images / "3.tiff", "text")
    model, table = saved(), tmp_path / "new" / "table.csv"

    assert run(model, mixed_images, "--top_k", 2, "--output", table) == 1

    assert capsys.readouterr().out == ""
    assert os.listdir(table.parent) == ["table.csv"]
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    _, results, _ = results_of(capsys, model, mixed_images, "--top_k", 2)
    assert list(rows[0]) == ["image", "label_1", "score_1", "label_2", "score_2", "error"]
    for row, result in zip(rows, results, strict=True):
        ranked = result.get("predictions", [{"label": "", "score": ""}] * 2)
        values = [value for best in ranked for value in best.values()]
        expected = [result["image"], *(f"{value:.7g}" if isinstance(value, float) else value for value in values)]
        assert list(row.values()) == [*expected, result.get("error", "")]


@pytest.mark.parametrize(("name", "is_table"), [("out.jsonl", False), ("out.CSV", True), ("out", False)])
def test_format_follows_the_suffix(name, is_table, saved, mixed_images, tmp_path):
    run(saved(), mixed_images / "0.tiff", "--output", tmp_path / name)

    first, *_ = (tmp_path / name).read_text().splitlines()
    assert first.startswith("image,label_1,score_1,") if is_table else json.loads(first)["predictions"]


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take names in UTF-8 only")
@pytest.mark.parametrize("to_file", [False, True], ids=["standard_output", "file"])
def test_name_that_is_not_in_utf_8_comes_out_as_it_is(to_file, saved, photographs, tmp_path, capsysbinary):
    image = tmp_path / os.fsdecode(b"caf\xe9.png")
    photographs[0].save(image)
    table = tmp_path / "table.csv"

    assert run(saved(), image, *(["--output", table] if to_file else [])) == 0

    written = table.read_bytes() if to_file else capsysbinary.readouterr().out
    assert (b"/caf\xe9.png," if to_file else b'/caf\\udce9.png"') in written


def test_closed_pipe_ends_the_command_silently(saved, mixed_images, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)  # as `head` does once it has its lines

    with os.fdopen(write, "w") as pipe:  # which is flushed at the end once more
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(saved(), mixed_images) == 141

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_in_a_terminal(terminal, saved, mixed_images, monkeypatch, capsys):
    model = saved()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    enable_progress_bars()

    run(model, mixed_images)
    disable_progress_bars()

    assert ("9/9" in capsys.readouterr().err) == terminal


def test_layers_are_measured_on_as_many_images_as_there_are(saved, mixed_images, monkeypatch):
    measured = []

    def optimize(model, pixels, images):
        measured.append((len(pixels), images))
        return speed.optimize(model, pixels, choice="plain")

    monkeypatch.setattr(predict, "optimize", optimize)
    model = saved()

    run(model, mixed_images / "7.jpg")
    run(model, mixed_images, "--batch_size", "4")

    assert measured == [(1, 1), (4, 9)]


def test_model_is_afterwards_as_it_was(saved, mixed_images, monkeypatch):
    monkeypatch.setattr(predict, "optimize", partial(speed.optimize, choice="eager+packed"))
    classifier = predict.load_classifier(str(saved()))
    before = [{*vars(module)} for module in classifier.model.modules()]

    assert len([*predict.predict(classifier, find_images([str(mixed_images)]))]) == 9

    assert [{*vars(module)} for module in classifier.model.modules()] == before
    assert classifier.model.config._attn_implementation == "sdpa"


def test_model_that_is_optimized_stays_so(saved, mixed_images):
    classifier = predict.load_classifier(str(saved()))
    speed.optimize(classifier.model, speed.example_batch_for(classifier.model, 1), choice="eager+packed")

    assert len([*predict.predict(classifier, find_images([str(mixed_images)]))]) == 9

    assert classifier.model.config._attn_implementation == "eager"
    assert any("made" in vars(module) for module in classifier.model.modules())


def test_threads_are_no_more_than_a_container_allows(saved, mixed_images, monkeypatch):
    asked = []
    monkeypatch.setattr(predict, "use_no_more_threads_than_cores", lambda: asked.append(True))
    run(saved(), mixed_images / "7.jpg")
    assert asked


# Refusals


def test_images_that_stay_of_different_sizes_are_refused_as_a_batch(saved, mixed_images, capsys):
    model = saved()
    ViTImageProcessor(do_resize=False, do_convert_rgb=True).save_pretrained(model)
    assert "leaves images of different sizes. Give --batch_size 1." in error_of(capsys, model, mixed_images)


def save_encoder(folder):
    ViTScratchModel(ViTScratchConfig(**TINY)).save_pretrained(folder)
    save_image_processor(folder)


def save_bert(folder):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(**sizes, vocab_size=3)).save_pretrained(folder)


def save_without_image_processor(folder):
    ViTScratchForImageClassification(ViTScratchConfig(**TINY)).save_pretrained(folder)


def save_grey(folder):
    ViTScratchForImageClassification(ViTScratchConfig(**TINY | {"num_channels": 1})).save_pretrained(folder)
    save_image_processor(folder)


def save_truncated(folder):
    save_without_image_processor(folder)
    save_image_processor(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def save_with_other_classes(folder):
    save_without_image_processor(folder)
    save_image_processor(folder)
    ViTScratchConfig(**TINY | {"num_labels": 7}).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda folder: None, r"is not a folder\. Give the folder of a saved model"),
        (Path.mkdir, r"cannot be loaded as an image classifier: Unrecognized model"),
        (save_encoder, r"is not an image classifier: its classifier\.bias is missing or of another shape\."),
        (
            save_with_other_classes,
            r"is not an image classifier: its classifier\.bias is missing or of another shape\.",
        ),
        (save_bert, r"cannot be loaded as an image classifier: .*BertConfig"),
        (save_without_image_processor, r"cannot be loaded as an image classifier: .*image processor"),
        (save_grey, r"is for images with num_channels 1, but every image is read as RGB\."),
        (save_truncated, r"cannot be loaded as an image classifier: .*deserializing header.*\(SafetensorError\)\."),
    ],
    ids=["missing", "empty", "encoder", "other_classes", "bert", "no_image_processor", "grey", "truncated"],
)
def test_folder_that_is_no_image_classifier_is_refused(save, message, mixed_images, tmp_path, capsys):
    folder = tmp_path / "theirs"
    save(folder)

    assert re.match(f"{folder} {message}", error_of(capsys, folder, mixed_images))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("runs/digits", r"is not a folder\. Give the folder of a saved model"),
        (
            "someone/digits",
            r"cannot be loaded as an image classifier: .*\(OSError\)",
        ),
    ],
)
def test_missing_run_is_not_looked_for_on_the_hub(model, message, mixed_images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()

    assert re.match(f"{model} {message}", error_of(capsys, model, mixed_images))


def test_model_of_timm_is_taken(mixed_images, tmp_path, capsys):
    prepared = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear",
                "crop_pct": 1.0}  # fmt: skip
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        num_labels=3,
        model_args={"img_size": 16, "depth": 1},
        pretrained_cfg=prepared,
    )
    TimmWrapperForImageClassification(config).save_pretrained(tmp_path / "model")

    code, results, _ = results_of(capsys, tmp_path / "model", mixed_images)

    assert code == 0
    for result in results:
        assert_same_predictions(result["predictions"], plain_predictions(tmp_path / "model", result["image"]))


def test_run_that_was_stopped_is_no_model_yet(saved, mixed_images, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    saved().rename(tmp_path / "run" / "checkpoint-3")
    (tmp_path / "run" / "last").symlink_to("checkpoint-3")

    message = error_of(capsys, tmp_path / "run", mixed_images)

    assert message.endswith(f"run holds a run that is not finished. Resume it, or give {tmp_path / 'run' / 'last'}.")


@pytest.mark.parametrize(("model_type", "code"), [("theirs", 2), ("vit_scratch", 0)])
def test_code_beside_a_model_is_not_executed(model_type, code, saved, mixed_images, tmp_path):
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForImageClassification": "theirs.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")

    assert run(folder, mixed_images) == code

    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top_k", "0"], r"top_k must be at least 1, got 0\."),
        (["--batch_size", "0"], r"batch_size must be at least 1, got 0\."),
        (["--num_workers", "-1"], r"num_workers must be 0 or more, got -1\."),
        (["--output", "."], r"--output must be a file, but \. is a folder\."),
        (["--output", "/dev/null/table.csv"], r".*: '/dev/null'"),
    ],
)
def test_impossible_option_is_refused(options, message, saved, mixed_images, capsys):
    assert re.match(message, error_of(capsys, saved(), mixed_images, *options))


def test_missing_device_is_refused(saved, mixed_images, capsys):
    assert vit_scratch.main(["predict", str(saved()), str(mixed_images), "--device", "abacus"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"error: --device abacus cannot be used: Expected one of .*: abacus \(RuntimeError\)\.$", line)


def test_output_to_a_special_file(saved, mixed_images):
    assert run(saved(), mixed_images, "--output", "/dev/null") == 0

    assert not Path("/dev/null").is_file()


def test_files_of_a_folder_that_are_no_images_are_counted(mixed_images, caplog):
    (mixed_images / "photo.heic").touch()

    assert len(find_images([str(mixed_images)])) == 9
    assert "files left out: 1 .heic (photo.heic). If they are images, save them as JPEG or PNG." in caplog.text
