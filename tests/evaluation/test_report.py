"""The files of a finished run."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from helpers import TINY, randomize_
from PIL import Image
from transformers import ViTImageProcessor
from transformers.trainer_utils import PredictionOutput

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchForMaskedImageModeling
from hf_vit_scratch.data.dataset import BatchTransform
from hf_vit_scratch.data.groups import LISTING
from hf_vit_scratch.data.images import denormalize
from hf_vit_scratch.data.masking import MaskedImageDataset
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.data.splits import SPLITS, load_splits
from hf_vit_scratch.evaluation import figures, report


def test_most_confident_mistakes_come_first(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "plot_images", lambda images, captions, path: drawn.extend(captions))
    monkeypatch.setattr(report, "NUM_MISTAKES", 2)
    logits = np.log([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.99, 0.01], [0.3, 0.7]])
    rows = Dataset.from_dict({"image": [Image.new("RGB", (4, 4))] * 5}, Features({"image": ImageFeature()}))

    for labels in (np.zeros(5, dtype=int), logits.argmax(1)):  # in the second, nothing is wrong
        report.list_answers(PredictionOutput(logits, labels, {}), rows, ["ant", "bee"], tmp_path / "m.png")

    assert drawn == ["taken for bee (80%)\nis ant", "taken for bee (70%)\nis ant"]


def test_label_that_is_wrong_by_most_is_listed(tmp_path, class_folders):
    rows = load_splits(str(class_folders), validation_fraction=0.4)["validation"].select(range(2))
    logits, labels = np.array([[3.0, -1.0], [2.0, -3.0]]), np.array([[1, 1], [1, 0]], np.int8)

    report.list_answers(PredictionOutput(logits, labels, {}), rows, ["day", "cat"], tmp_path / "m.png")

    listed = pd.read_csv(tmp_path / "_answers.csv").to_dict("list")
    assert (listed["label"], listed["truth"]) == (["cat", "day"], [1, 1])


def test_large_numbers_are_listed_whole(tmp_path, class_folders):
    rows = load_splits(str(class_folders), validation_fraction=0.4)["validation"].select(range(2))
    prices = np.array([[1234567.0], [7654321.0]], np.float32)

    report.list_answers(PredictionOutput(prices + 1, prices, {}), rows, ["price"], tmp_path / "m.png")

    listed = pd.read_csv(tmp_path / "_answers.csv").to_dict("list")
    assert {*listed["truth"]} == {1234567, 7654321}
    assert {*listed["score"]} == {1234568, 7654322}


def test_all_answers_are_listed_with_their_files_mistakes_first(tmp_path, class_folders):
    labels, logits = np.array([0, 1, 0]), np.log([[0.4, 0.6], [0.1, 0.9], [0.24999996, 0.75000004]])
    files = [str(class_folders / "temple" / f"0{number}.jpg") for number in range(3)]
    rows = Dataset.from_dict({"image": files}, Features({"image": ImageFeature()}))

    report.list_answers(PredictionOutput(logits, labels, {}), rows, ["ant", "bee"], tmp_path / "m.png")

    listed = pd.read_csv(tmp_path / "_answers.csv").to_dict("list")
    assert listed["image"] == [files[2], files[0], files[1]]
    assert (listed["answer"], listed["truth"]) == (["bee"] * 3, ["ant", "ant", "bee"])
    assert listed["score"] == [0.75, 0.6, 0.9]


@torch.no_grad()
def test_mirrored_views_have_the_mean_logits_of_both_sides():
    config = ViTScratchConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = randomize_(ViTScratchForImageClassification(config), 0.3).double().eval()
    pixels, numbers = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    left, right = model(pixel_values=pixels).logits, model(pixel_values=pixels.flip(-1)).logits

    def predict(pixel_values):
        return PredictionOutput(model(pixel_values=pixel_values).logits.numpy(), numbers.numpy(), {})

    trainer = SimpleNamespace(args=SimpleNamespace(eval_tta="flip"), model=model, predict=predict)
    outputs = report.predict_split(trainer, pixels)

    mean_error, one_sided = ((logits - numbers).abs().mean().item() for logits in ((left + right) / 2, left))
    assert abs(mean_error - one_sided) > 1e-3
    assert outputs.metrics["test_flip_mae"] == pytest.approx(mean_error, abs=1e-6)
    torch.testing.assert_close(torch.from_numpy(outputs.predictions), left, rtol=0, atol=0)
    torch.testing.assert_close(model(pixel_values=pixels).logits, left, rtol=0, atol=0)


SCORES = {"precision": 0.5, "recall": 1.0, "f1-score": 2 / 3, "support": 3.0}
METRICS = {"test_accuracy": 0.75, "test_balanced_accuracy": 0.7, "test_macro_f1": 0.65, "test_loss": 0.0614}
CLASSES = {"problem_type": "single_label_classification", "images": 4, "labels": ["bee", "a long name"]}


def test_table_at_the_end_says_what_a_reader_looks_for_first():
    mirrored = {"test_flip_accuracy": 0.8}
    lines = report.summary(
        METRICS | mirrored | CLASSES | {"per_class": dict.fromkeys(CLASSES["labels"], SCORES)}, 4, 0.93
    )
    assert lines.splitlines() == [
        "Test images                           4",
        "Test loss                             0.061",
        "Test accuracy                         75.0%, 95% interval 30.1 to 95.4",
        "Test balanced accuracy                70.0%",
        "Test macro-F1                         0.650",
        "Test accuracy with the mirrored view  80.0%",
        "For comparison                        75.0% by always answering bee",
        "Training                              0.9 minutes",
        "Class       precision recall  images",
        "bee               50%   100%       3",
        "a long name       50%   100%       3",
    ]


def test_table_compares_several_labels_with_random_answers():
    known, empty = SCORES | {"auroc": 0.9, "average-precision": 0.8}, SCORES | {"support": 0.0}
    several = {"problem_type": "multi_label_classification", "images": 4, "labels": ["day", "fox", "never"]}
    rows = {"day": known, "fox": known | {"support": 1.0}, "never": empty}

    assert "For comparison  mean average precision 0.500 at random" in report.summary(several | {"per_class": rows}, 4)


@pytest.mark.parametrize(
    ("problem_type", "metric", "line"),
    [
        (
            "multi_label_classification",
            "average_precision",
            "Test mean average precision with the mirrored view  0.500",
        ),
        ("regression", "r2", "Test R2 with the mirrored view  0.500"),
    ],
)
def test_mirrored_views_of_labels_and_numbers_are_shown(problem_type, metric, line):
    found = {"problem_type": problem_type, "images": 4, f"test_{metric}": 0.25, f"test_flip_{metric}": 0.5}
    assert line in report.summary(found, 4).splitlines()


def test_table_leaves_out_the_rows_of_many_classes_and_what_a_model_without_classes_lacks():
    many = report.summary(METRICS | CLASSES | {"per_class": {str(number): SCORES for number in range(11)}}, 4)
    assert "Class " not in many
    assert report.summary({"test_loss": 0.25, "epoch": 18.66}, 4, minutes=12.0).splitlines() == [
        "Test images  4",
        "Test loss    0.250",
        "Training     12.0 minutes, 18.66 passes",
    ]


def test_images_of_a_local_source_that_was_moved_stay_private(tmp_path, class_folders):
    rows = load_splits(str(class_folders))["test"]
    (tmp_path / SPLITS).touch()
    outputs = PredictionOutput(np.tile([0.0, 9.0], (len(rows), 1)), np.zeros(len(rows), int), METRICS)

    found = report.write_report(outputs, rows, "photos.parquet", "train", tmp_path)

    assert not found["data_is_on_the_hub"]
    assert [file.name for file in tmp_path.glob("*mistakes.png")] == ["_mistakes.png"]


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (SimpleNamespace(private=False, gated=False), "mistakes.png"),
        (SimpleNamespace(private=False, gated="auto"), "_mistakes.png"),
        (SimpleNamespace(private=True, gated=False), "_mistakes.png"),
        (ConnectionError("offline"), "_mistakes.png"),
    ],
    ids=["public", "gated", "private", "offline"],
)
def test_images_of_the_hub_are_shown_only_if_anybody_may_see_them(answer, name, tmp_path, class_folders, monkeypatch):
    rows = load_splits(str(class_folders))["test"]
    monkeypatch.setattr(report, "dataset_info", Mock(side_effect=[answer]))
    outputs = PredictionOutput(np.tile([0.0, 9.0], (len(rows), 1)), np.zeros(len(rows), int), METRICS)

    assert report.write_report(outputs, rows, "owner/set", "train", tmp_path)["data_is_on_the_hub"]

    assert [file.name for file in tmp_path.glob("*mistakes.png")] == [name]


def test_listed_near_duplicates_are_in_the_metrics_and_the_table(tmp_path, class_folders):
    rows = load_splits(str(class_folders), listing=tmp_path / LISTING)["test"]
    (tmp_path / LISTING).write_text(
        "image_1,split_1,image_2,split_2,same_label\na,train,b,test,True\nc,test,d,test,True\n"
    )
    outputs = PredictionOutput(np.zeros((len(rows), 2)), np.array(rows["label"]), METRICS)

    found = report.write_report(outputs, rows, str(class_folders), "train", tmp_path)

    assert found["near_duplicates"] == 2
    assert "Near duplicates         pairs: 2, none of them in two splits" in report.summary(found, len(rows))


def test_a_row_of_the_confusion_matrix_is_a_line(tmp_path, class_folders):
    rows = load_splits(str(class_folders))["test"]
    outputs = PredictionOutput(np.tile([0.0, 9.0], (len(rows), 1)), np.zeros(len(rows), int), METRICS)

    found = report.write_report(outputs, rows, str(class_folders), "train", tmp_path)

    text = (tmp_path / "metrics.json").read_text()
    assert json.loads(text) == found
    assert f"\n      0, {len(rows)}\n" in text


def test_classes_without_images_are_left_out_of_the_table():
    row = {"precision": 1.0, "recall": 0.5, "f1-score": 0.7}
    classes = {"cat": row | {"support": 2.0}, "dog": row | {"support": 0.0}}

    table = report.summary({"test_loss": 1.0, "per_class": classes}, 2)

    assert "cat" in table
    assert "dog" not in table


def test_reconstruction_is_drawn_where_the_patch_was_hidden(tmp_path, monkeypatch):
    rows = load_digits()["test"].select(range(3))
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
    dataset = MaskedImageDataset(rows, BatchTransform(processor), patch_size=(2, 2))
    model = ViTScratchForMaskedImageModeling(ViTScratchConfig(**TINY | {"image_size": 8, "patch_size": 2})).eval()
    drawn = []
    monkeypatch.setattr(report, "plot_images", lambda images, captions, path, columns: drawn.extend(images))

    report.draw_reconstructions(model, dataset, tmp_path / "picture.png")

    batch = dataset.batch_transform(dataset.__getitems__(range(3)))
    with torch.no_grad():
        reconstruction = model(batch["pixel_values"], batch["bool_masked_pos"]).reconstruction
    hidden = batch["bool_masked_pos"].view(3, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).numpy()
    images, shown, reconstructed = (np.stack([np.asarray(image) for image in drawn[n : n + 3]]) for n in (0, 3, 6))
    assert np.array_equal(reconstructed[hidden], denormalize(reconstruction, processor)[hidden])
    assert np.array_equal(reconstructed[~hidden], images[~hidden])
    assert np.array_equal(shown[~hidden], images[~hidden])
    assert len(np.unique(shown[hidden])) == 1


def test_predicted_numbers_are_drawn_over_the_true_ones(tmp_path, monkeypatch):
    drawn, new_figure = [], figures.new_figure
    monkeypatch.setattr(figures, "new_figure", lambda *size: drawn.append(new_figure(*size)) or drawn[-1])
    true, predicted = np.array([[1.0], [2.0], [3.0]]), np.array([[1.5], [2.5], [9.0]])

    figures.plot_numbers(true, predicted, ["age"], tmp_path / "picture.png")

    (axes,) = drawn[0].axes
    assert axes.collections[0].get_offsets().tolist() == [[1.0, 1.5], [2.0, 2.5], [3.0, 9.0]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("true", "predicted")
