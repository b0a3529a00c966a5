import numpy as np
import torch
from sklearn.metrics import top_k_accuracy_score
from transformers import EvalPrediction

from hf_vit_scratch.metrics import TopKAccuracy, compute_metrics, rank_top5


def test_accuracy_of_rankings_by_hand():
    rankings = [[3, 1, 0, 2, 4], [0, 1, 2, 3, 4], [9, 8, 7, 6, 5], [5, 6, 7, 8, 9]]

    assert TopKAccuracy().compute(predictions=rankings, references=[3, 4, 0, 6]) == {
        "accuracy": 0.25, "top5_accuracy": 0.75
    }  # fmt: skip


def test_metrics_from_logits_match_scikit_learn():
    logits, labels = torch.randn(500, 12), torch.randint(0, 12, (500,))

    metrics = compute_metrics(EvalPrediction(rank_top5(logits, labels).numpy(), labels.numpy()))

    expected = [top_k_accuracy_score(labels, logits, k=k, labels=np.arange(12)) for k in (1, 5)]
    assert [metrics["accuracy"], metrics["top5_accuracy"]] == expected


def test_fewer_than_five_classes():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])

    assert rank_top5(logits, torch.zeros(2)).tolist() == [[1, 0], [0, 1]]
