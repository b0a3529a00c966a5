"""Top-1 and top-5 accuracy, as an `evaluate.Metric` of our own: `evaluate.load` would need the network."""

from typing import Any

import datasets
import evaluate
import numpy as np
from torch import Tensor
from transformers import EvalPrediction

METRIC_NAMES = ("loss", "accuracy", "top5_accuracy")  # of an evaluation; the loss is the Trainer's


class TopKAccuracy(evaluate.Metric):
    """Share of images whose class is the first, or among the first five, of the model's ranking.

    Example:
        >>> TopKAccuracy().compute(predictions=[[2, 0], [1, 2]], references=[2, 0])
        {'accuracy': 0.5, 'top5_accuracy': 0.5}
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Top-1 and top-5 accuracy from ranked predictions.",
            citation="",
            inputs_description="predictions: class ids, best first; references: the true class ids.",
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        hits = np.asarray(predictions) == np.asarray(references)[:, None]
        return {"accuracy": float(hits[:, 0].mean()), "top5_accuracy": float(hits[:, :5].any(axis=1).mean())}


def rank_top5(logits: Tensor, labels: Tensor) -> Tensor:
    """Reduce logits (B, L) to the ids of the five best classes (B, 5), so that an evaluation needs little memory."""
    return logits.topk(min(5, logits.shape[-1]), dim=-1).indices


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """The Trainer's metrics from ranked predictions (N, 5) and class ids (N,)."""
    metric = TopKAccuracy(keep_in_memory=True)
    return metric.compute(predictions=evaluation.predictions, references=evaluation.label_ids)
