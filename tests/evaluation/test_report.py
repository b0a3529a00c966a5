"""The files of a finished run."""

import io

import numpy as np
import torch
from PIL import Image
from transformers.trainer_utils import PredictionOutput

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
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


@torch.no_grad()
def test_mirrored_views_have_the_mean_logits_of_both_sides():
    config = ViTScratchConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = ViTScratchForImageClassification(config).double().eval()
    pixels = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    left, right = model(pixel_values=pixels).logits, model(pixel_values=pixels.flip(-1)).logits
    with report.mirrored_views(model):
        torch.testing.assert_close(model(pixel_values=pixels).logits, (left + right) / 2, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(pixel_values=pixels).logits, left, rtol=0, atol=0)
