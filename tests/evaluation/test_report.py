"""The files of a finished run."""

import io

import numpy as np
from PIL import Image
from transformers.trainer_utils import PredictionOutput

from hf_vit_scratch.evaluation import report


def test_most_confident_mistakes_come_first(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "plot_images", lambda images, captions, path: drawn.extend(captions))
    monkeypatch.setattr(report, "NUM_MISTAKES", 2)
    ranked = np.array([[0, 1], [1, 0], [1, 0], [0, 1], [1, 0]])
    summaries = (ranked, np.array([0.9, 0.6, 0.8, 0.99, 0.7]), np.zeros(5))
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")

    class Rows:
        def __getitem__(self, places):
            return {"image": [{"path": None, "bytes": file.getvalue()}] * len(places)}

    for labels in (np.zeros(5, dtype=int), ranked[:, 0]):  # in the second, nothing is wrong
        report.draw_mistakes(PredictionOutput(summaries, labels, {}), Rows(), ["ant", "bee"], tmp_path / "m.png")

    assert drawn == ["taken for bee (80%)\nis ant", "taken for bee (70%)\nis ant"]


def test_table_at_the_end_says_what_a_reader_looks_for_first():
    scores = {"precision": 0.5, "recall": 1.0, "f1-score": 2 / 3, "support": 3.0}
    metrics = {"test_accuracy": 0.9861, "test_top5_accuracy": 1.0, "test_loss": 0.0614}
    lines = report.summary({**metrics, "per_class": {"bee": scores, "a long name": scores}}, 6, minutes=0.93)
    assert lines.splitlines() == [
        "Test       accuracy 98.6%, loss 0.061, 6 images",
        "Class       precision recall  images",
        "bee               50%   100%       3",
        "a long name       50%   100%       3",
        "Training   0.9 minutes",
    ]


def test_table_leaves_out_the_rows_of_many_classes_and_what_a_model_without_classes_lacks():
    scores = {"precision": 0.5, "recall": 1.0, "f1-score": 2 / 3, "support": 3.0}
    metrics = {"test_accuracy": 0.5, "test_top5_accuracy": 0.75, "test_loss": 1.0}
    many = report.summary({**metrics, "per_class": {str(number): scores for number in range(11)}}, 33)
    assert many == "Test       accuracy 50.0%, top-5 accuracy 75.0%, loss 1.000, 33 images"
    assert report.summary({"test_loss": 0.25}, 4, minutes=12.0) == (
        "Test       loss 0.250, 4 images\nTraining   12.0 minutes"
    )
