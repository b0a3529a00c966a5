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
