"""Metrics of classification, computed offline: `evaluate.load` would need the network."""

from typing import Any, cast

import datasets
import evaluate
import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor
from torch.nn import functional as F
from transformers import EvalPrediction

METRIC_NAMES = ("loss", "accuracy", "top5_accuracy")
CALIBRATION_BINS = 15


class TopKAccuracy(evaluate.Metric):
    """Share of images whose class is the first, or among the first five, of the model's ranking."""

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


def summarize_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce logits (B, L) to what the metrics need, to save memory in an evaluation.

    Returns:
        The ids of the five best classes (B, 5), the probability of the best (B,), and the cross-entropy (B,).
    """
    logits = logits.float()
    return (
        logits.topk(min(5, logits.shape[-1]), dim=-1).indices,
        logits.softmax(dim=-1).amax(dim=-1),
        F.cross_entropy(logits, labels, reduction="none"),
    )


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Compute the Trainer's metrics from the summaries of `summarize_logits` and class ids (N,).

    Example:
        >>> summaries = (np.array([[2, 0], [1, 2]]), np.array([0.9, 0.6]), np.array([0.1, 1.5]))
        >>> compute_metrics(EvalPrediction(summaries, np.array([2, 0])))
        {'accuracy': 0.5, 'top5_accuracy': 0.5, 'exact_loss': 0.8}
    """
    ranked, _, losses = cast(tuple[np.ndarray, ...], evaluation.predictions)
    accuracies = TopKAccuracy(keep_in_memory=True).compute(predictions=ranked, references=evaluation.label_ids)
    return {**accuracies, "exact_loss": float(losses.mean(dtype=np.float64))}


def detailed_report(predictions: Any, labels: Any, label_names: list[str]) -> dict[str, Any]:
    """Report scores per class, the confusion matrix and the calibration.

    Args:
        predictions: Summaries from `summarize_logits` of N images.
        labels: Class ids (N,).
        label_names: Names of the L classes.

    Returns:
        `per_class`: precision, recall, f1-score and support of each class. `confusion_matrix`: L rows of L counts; a
        row is a true class, a column a predicted one. `calibration`: the expected calibration error (Guo et al. 2017,
        https://arxiv.org/abs/1706.04599, equation 3) and, for each bin of confidence that has images, its upper edge,
        their number, their mean confidence and their accuracy.
    """
    ranked, confidence, _ = predictions
    best, ids = ranked[:, 0], list(range(len(label_names)))
    # `classification_report` puts its averages among the classes, one of which may be named accuracy.
    scores = precision_recall_fscore_support(labels, best, labels=ids, zero_division=0.0)
    names = ("precision", "recall", "f1-score", "support")
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:]
    places, right = np.digitize(confidence, edges, right=True), best == labels
    bins = [
        {
            "confidence_up_to": round(float(edges[place]), 4),
            "images": int((places == place).sum()),
            "mean_confidence": float(confidence[places == place].mean()),
            "accuracy": float(right[places == place].mean()),
        }
        for place in np.unique(places)
    ]
    error = sum(bin["images"] * abs(bin["accuracy"] - bin["mean_confidence"]) for bin in bins) / len(labels)
    return {
        "per_class": {
            label: dict(zip(names, map(float, of_class), strict=True))
            for label, *of_class in zip(label_names, *scores, strict=True)
        },
        "confusion_matrix": confusion_matrix(labels, best, labels=ids).tolist(),
        "calibration": {"expected_calibration_error": error, "bins": bins},
    }
