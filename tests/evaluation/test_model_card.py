"""Model cards: what the Hub reads of them, and what a person does."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from matplotlib import font_manager, rcParams
from matplotlib.figure import Figure
from PIL import Image

import vit_scratch
from hf_vit_scratch import ViTScratchConfig
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.figures import new_figure, plot_confusion, plot_images, plot_numbers, plot_reliability
from hf_vit_scratch.evaluation.metrics import detailed_report
from hf_vit_scratch.evaluation.model_card import describe_machine, make_card, results_of

ROOT = Path(__file__).parents[2]
LABELS = ["cat", "dog", "eel"]


@pytest.fixture
def finished_run(tmp_path):
    """Makes the folder of a run with three test images, of which `right` are classified rightly, and its figures."""

    def make(name, right=2, data_is_on_the_hub=True, **recipe):
        folder = tmp_path / name
        folder.mkdir()
        ViTScratchConfig(image_size=[8, 16], patch_size=4, hidden_size=32, num_attention_heads=2).save_pretrained(
            folder
        )
        labels = [0, 1, 2]
        best = [label if number < right else (label + 1) % 3 for number, label in enumerate(labels)]
        report = detailed_report(np.log(np.where(np.eye(3)[best], 0.5, 0.25)), labels, LABELS)
        metrics = {
            "test_accuracy": right / 3, "test_top5_accuracy": 1.0, "test_loss": 0.7, "epoch": 3.0, "labels": LABELS,
            "data_is_on_the_hub": data_is_on_the_hub,
            "command": f"python train.py x --output_dir {folder}", **report, **describe_machine(),
        }  # fmt: skip
        (folder / "metrics.json").write_text(json.dumps(metrics))
        log = [{"step": step, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 101)]
        log += [{"step": 100, "eval_accuracy": 0.5, "eval_loss": 0.9}, {"step": 100, "train_runtime": 12.3}]
        (folder / "log.json").write_text(json.dumps(log))
        for figure in ("curves.png", "confusion_matrix.png", "reliability.png"):
            (folder / figure).write_text(f"{figure} of {name}")
        recipe = {"data": "owner/animals", "hidden_size": 32, "output_dir": str(folder)} | recipe
        (folder / "recipe.yaml").write_text(f"# a comment\n{yaml.safe_dump(recipe)}")
        return folder

    return make


def test_metadata_are_what_the_hub_reads(finished_run, tmp_path):
    make_card([finished_run("a")], tmp_path / "README.md", name="zoo", license="apache-2.0")

    data = ModelCard.load(tmp_path / "README.md").data

    assert (data.license, data.pipeline_tag, data.datasets) == (
        "apache-2.0",
        "image-classification",
        ["owner/animals"],
    )
    assert (data.library_name, data.model_name, data.metrics) == ("transformers", "zoo", ["accuracy"])
    (result,) = data.eval_results
    assert (result.dataset_type, result.dataset_split, result.metric_type) == ("owner/animals", "test", "accuracy")
    assert result.metric_value == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize("calibrated", [True, False])
def test_card_says_whether_predict_may_call_an_image_unknown(calibrated, finished_run, tmp_path):
    path = finished_run("a") / "metrics.json"
    report = json.loads(path.read_text())
    trust = {"calibration_error": 0.1, "error_before": 0.2, "target_accuracy": None}
    path.write_text(json.dumps(report | ({"trust": trust} if calibrated else {})))

    make_card([path.parent], tmp_path / "zoo.md")

    said = "every image, but `vit-scratch predict` may call an image unknown. The results"
    assert (said in (tmp_path / "zoo.md").read_text()) == calibrated


def test_card_shows_the_results_and_has_its_pictures(finished_run, tmp_path):
    make_card([finished_run("a")], tmp_path / "cards" / "zoo.md")

    text = (tmp_path / "cards" / "zoo.md").read_text()

    assert "| test accuracy | 66.7%, 95% interval 20.8 to 93.9 |" in text
    assert "| eel | 0.000 | 0.000 | 0.000 | 1 |" in text
    assert "owner/animals: 3 test images, 3 classes" in text
    assert "12 post-LN layers of width 32 with 2 heads, on images of 8x16 pixels in patches of 4x4" in text
    assert "3.0 passes over the training images in 12 seconds" in text
    assert "| 100 | 0.01 | 0.9 | 0.5 | 0.1 |" in text  # a line of the evaluation, with that of its step
    assert "| 99 |" not in text
    assert "ore information needed" not in text.lower()
    for picture in ("curves.png", "confusion_matrix.png", "reliability.png"):
        assert f"](zoo_{picture})" in text
        assert (tmp_path / "cards" / f"zoo_{picture}").read_text() == f"{picture} of a"


def test_card_of_a_resumed_run_counts_the_time_before(finished_run, tmp_path):
    run = finished_run("a")
    log = json.loads((run / "log.json").read_text())
    (run / "log.json").write_text(json.dumps([*log, {"step": 100, "loss": 0.1, "minutes": 2.5}]))
    make_card([run], tmp_path / "zoo.md")
    assert "3.0 passes over the training images in 150 seconds" in (tmp_path / "zoo.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "model_cards").glob("*.md")), ids=lambda path: path.stem)
def test_shipped_card_has_the_metadata_of_the_hub_and_the_number_that_the_table_shows(path):
    card = ModelCard.load(path)

    (result,) = card.data.eval_results
    shown = float(re.search(r"\| test accuracy \| ([\d.]+)%", card.content)[1])
    assert round(100 * result.metric_value, 1) == shown
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "image-classification")
    assert (card.data.model_name, card.data.metrics) == (path.stem, ["accuracy"])
    assert "more information needed" not in card.content.lower()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", card.content):
        assert (path.parent / picture).is_file()


def test_several_seeds_are_shown_with_their_spread(finished_run, tmp_path):
    runs = [finished_run("a", right=3), finished_run("b", right=2), finished_run("c", right=1)]

    card = make_card(runs, tmp_path / "card.md")

    assert "| test accuracy | 66.7% (100.0, 66.7, 33.3 in 3 runs), 95% interval 20.8 to 93.9 |" in str(card)
    assert card.data.eval_results[0].metric_value == pytest.approx(2 / 3, abs=1e-6)
    assert str(card).count("python train.py") == 3


def test_card_has_the_license_of_its_run(finished_run, tmp_path):
    make_card([finished_run("a", license="mit")], tmp_path / "README.md")
    assert ModelCard.load(tmp_path / "README.md").data.license == "mit"


def test_runs_that_learnt_other_labels_are_not_averaged(finished_run, tmp_path):
    one, other = finished_run("a"), finished_run("b")
    metrics = json.loads((other / "metrics.json").read_text()) | {"labels": ["cat", "dog", "fox"]}
    (other / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(
        UserError, match=r"b learnt other labels than .*a\. A card is for runs that differ in the seed"
    ):
        make_card([one, other], tmp_path / "README.md")


@pytest.mark.parametrize(
    ("path", "name"), [("/home/J Smith/my photos", "my photos"), (r"C:\Users\J Smith\photos", "photos")]
)
def test_folders_with_spaces_and_of_windows_are_left_out(path, name, finished_run, tmp_path):
    run = finished_run("a", data=path, data_is_on_the_hub=False, label_column=["x", path])
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["command"] = shlex.join(["train.py", "--data", path, f"--output_dir={path}", "--max_steps", "3"])
    (run / "metrics.json").write_text(json.dumps(metrics))
    text = str(make_card([run], tmp_path / "card.md"))
    assert "Smith" not in text
    command = shlex.join(["train.py", "--data", name, f"--output_dir={name}", "--max_steps", "3"])
    assert f"    {command}\n" in text
    assert f"data: {name}\n" in text


@pytest.mark.parametrize("pattern", [r"\w+_(\d+)", r"a:(\d+)", "x/(y)", r"/(video_\d+)/"])
def test_expression_is_no_path(pattern, finished_run, tmp_path):
    text = str(make_card([finished_run("a", group_by=pattern)], tmp_path / "card.md"))
    assert f"group_by: {pattern}\n" in text or f"group_by: '{pattern}'\n" in text


@pytest.mark.parametrize("flag", ["--group_by", "--group-by"])
def test_expression_in_the_command_is_no_path(flag, finished_run, tmp_path):
    run, pattern = finished_run("a"), "/(p[0-9]+)/"
    metrics = json.loads((run / "metrics.json").read_text())
    for given in ([flag, pattern], [f"{flag}={pattern}"]):
        metrics["command"] = shlex.join(["train.py", *given])
        (run / "metrics.json").write_text(json.dumps(metrics))

        assert f"    {metrics['command']}\n" in str(make_card([run], tmp_path / "card.md"))


def test_separator_is_no_path(finished_run, tmp_path):
    assert "label_separator: /\n" in str(make_card([finished_run("a", label_separator="/")], tmp_path / "card.md"))


def test_bar_in_the_name_of_a_class_makes_no_column(finished_run, tmp_path):
    run = finished_run("a")
    report = json.loads((run / "metrics.json").read_text())
    report["per_class"] = {f"{name}|x": row for name, row in report["per_class"].items()}
    (run / "metrics.json").write_text(json.dumps(report))

    assert "\n| dog\\|x |" in str(make_card([run], tmp_path / "card.md"))


def test_card_shows_no_picture_of_an_earlier_one(finished_run, tmp_path):
    run = finished_run("a")
    make_card([run], tmp_path / "card.md")
    (run / "confusion_matrix.png").unlink()

    assert "confusion_matrix.png" not in str(make_card([run], tmp_path / "card.md"))


def test_figures_of_a_card_with_a_space_in_its_name_are_shown(finished_run, tmp_path):
    card = make_card([finished_run("a")], tmp_path / "my card.md")

    assert "(my%20card_curves.png)" in str(card)
    assert (tmp_path / "my card_curves.png").is_file()


def test_card_of_a_stream_counts_no_passes(finished_run, tmp_path):
    run = finished_run("a")
    metrics = json.loads((run / "metrics.json").read_text())
    del metrics["epoch"]
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert "| training | 12 seconds |" in str(make_card([run], tmp_path / "card.md"))


def test_paths_of_the_machine_are_left_out(finished_run, tmp_path):
    run = finished_run("a", data=str(tmp_path / "photos"), data_is_on_the_hub=False)

    card = make_card([run], tmp_path / "card.md", data="my photographs")

    assert str(tmp_path) not in str(card)
    assert "data: photos" in str(card)
    assert "python train.py x --output_dir a" in str(card)
    assert "my photographs: 3 test images" in str(card)
    assert card.data.datasets is None


@pytest.mark.parametrize(
    ("model", "origin", "from_scratch"),
    [
        ("S/16", "trained from random weights", True),
        ("/runs/mim", "fine-tuned from `mim`", False),
        ("~/runs/mim", "fine-tuned from `mim`", False),
        ("google/vit-base", "fine-tuned from `google/vit-base`", False),
    ],
)
def test_card_says_where_the_weights_began(finished_run, tmp_path, model, origin, from_scratch):
    card = make_card([finished_run("a", model=model)], tmp_path / "card.md")

    assert f"A Vision Transformer, {origin} with" in str(card)
    assert ("trained-from-scratch" in card.data.tags) == from_scratch


def test_error_of_small_numbers_has_digits():
    texts = [
        results_of([{"problem_type": "regression", "images": 9, "test_mae": error}]) for error in (3.12345e-4, 12345)
    ]
    assert [text["test mean absolute error"] for text in texts] == ["0.0003123", "12345.000"]


def test_metadata_name_the_split_that_was_tested(finished_run, tmp_path):
    card = make_card([finished_run("a", test_split="validation")], tmp_path / "card.md")

    assert card.data.eval_results[0].dataset_split == "validation"


@pytest.mark.parametrize(
    ("metrics", "is_run"),
    [
        (None, True),
        ('{"test_loss": 1.0}', True),
        ('{"problem_type": "regression"}', False),
        ('{"problem_type": "regression"}', True),
    ],
    ids=["unfinished", "without labels", "of evaluate", "without a model"],
)
def test_folder_without_a_finished_run_is_refused(metrics, is_run, tmp_path, capsys):
    if is_run:
        (tmp_path / "log.json").write_text("[]")
    if metrics:
        (tmp_path / "metrics.json").write_text(metrics)

    assert vit_scratch.main(["card", str(tmp_path), "--output", str(tmp_path / "card.md")]) == 2

    assert f"{tmp_path} holds no finished run of a classifier" in capsys.readouterr().err


def test_card_is_no_folder(tmp_path, capsys):
    assert vit_scratch.main(["card", "run", "--output", str(tmp_path)]) == 2

    assert f"--output must be a file, but {tmp_path} is a folder." in capsys.readouterr().err


def test_font_with_eastern_characters_is_added_if_there_is_one(monkeypatch):
    monkeypatch.setitem(rcParams, "font.family", ["serif"])
    monkeypatch.setattr(font_manager, "get_font_names", lambda: ["DejaVu Sans", "Hiragino Sans"])

    new_figure(1, 1)
    new_figure(1, 1)

    assert rcParams["font.family"] == ["serif", "Hiragino Sans"]


def test_confusion_is_drawn_as_shares_of_the_true_class_by_row(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure.axes[0]))

    plot_confusion([[8, 2], [0, 5]], ["cat", "dog"], tmp_path / "confusion_matrix.png")

    (axes,) = drawn
    assert axes.images[0].get_array().tolist() == [[0.8, 0.2], [0.0, 1.0]]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true", "predicted")
    assert {(text.get_position(), text.get_text()) for text in axes.texts} == {
        ((0, 0), "80"), ((1, 0), "20"), ((1, 1), "100"),
    }  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog (5)"]  # so 100% says little


def test_dollars_in_names_are_no_formula(tmp_path):
    names = ["$5_to_$10", "$10_to_$20"]
    plot_confusion([[1, 0], [0, 1]], names, tmp_path / "confusion.png")
    plot_images([Image.new("RGB", (8, 8))], [f"taken for {names[0]}\nis {names[1]}"], tmp_path / "mistakes.png")
    plot_numbers(np.zeros((3, 1)), np.ones((3, 1)), names[:1], tmp_path / "numbers.png")


def test_reliability_is_accuracy_over_confidence(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure.axes[0]))
    bins = [
        {"images": 1, "mean_confidence": 0.3, "accuracy": 0.0},
        {"images": 3, "mean_confidence": 0.9, "accuracy": 2 / 3},
    ]

    plot_reliability(bins, 0.25, tmp_path / "reliability.png")

    (axes,) = drawn
    assert axes.lines[1].get_xydata().tolist() == [[0.3, 0.0], [0.9, 2 / 3]]
    assert axes.lines[0].get_xydata().tolist() == [[0, 0], [1, 1]]
    small, large = axes.collections[0].get_sizes() - 20
    assert large == pytest.approx(3 * small)
    assert "0.250" in axes.get_title()


def test_mistakes_are_drawn_each_below_its_caption(tmp_path, monkeypatch, photographs):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.extend(figure.axes))
    images = [photograph.resize((20, 10)) for photograph in photographs]

    plot_images(images, ["a temple", "a flower"], tmp_path / "mistakes.png")

    (axes,) = drawn
    for shown, text, image, caption in zip(axes.images, axes.texts, images, ["a temple", "a flower"], strict=True):
        np.testing.assert_array_equal(shown.get_array(), np.asarray(image))
        left, right, bottom, top = shown.get_extent()
        assert right - left == pytest.approx(2 * (bottom - top))
        assert text.get_text() == caption
        x, y = text.get_position()
        assert x == pytest.approx((left + right) / 2)
        assert y < top  # the axis points down


def test_mistakes_that_the_run_has_drawn_are_in_the_card(finished_run, tmp_path):
    folder = finished_run("a")
    without = make_card([folder], tmp_path / "without.md")
    Image.new("RGB", (4, 4)).save(folder / "mistakes.png")

    card = make_card([folder], tmp_path / "zoo.md")
    make_card([folder], folder / "README.md")

    assert "mistakes" not in str(without)
    assert "(zoo_mistakes.png)" in str(card)
    assert (tmp_path / "zoo_mistakes.png").read_bytes() == (folder / "mistakes.png").read_bytes()
    assert "(mistakes.png)" in (folder / "README.md").read_text()
