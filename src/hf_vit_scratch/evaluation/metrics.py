"""Metrics for each kind of problem, computed offline. The targets tell which kind, as in `data/targets.py`."""

import math
import tempfile
from collections.abc import Iterable
from typing import Any, cast

import datasets
import evaluate
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit, log_softmax, softmax
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    mean_absolute_error,
    precision_recall_fscore_support,
    r2_score,
    roc_auc_score,
)
from transformers import EvalPrediction

from ..data.targets import ProblemType
from ..errors import UserError

# By problem type; the first one chooses the best model, unless the user does.
METRIC_NAMES = {
    "single_label_classification": ("accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", "loss"),
    "multi_label_classification": ("average_precision", "auroc", "macro_f1", "loss"),
    "regression": ("r2", "mae", "loss"),
}
SHARES_OF_IMAGES = ("accuracy", "top5_accuracy")  # which have Wilson's interval
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


def problem_type_of(targets: Any) -> ProblemType:
    """Return the problem type of targets, a tensor or an array: ids (N,), integers (N, L), or floats."""
    if "float" in str(targets.dtype):
        return "regression"
    return "single_label_classification" if targets.ndim == 1 else "multi_label_classification"


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share of so many images (Wilson 1927)."""
    interval = binomtest(round(share * number), number).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Compute the Trainer's metrics from logits (N, L) and targets.

    Targets are integers, ids (N,) of single classes or zeros and ones (N, L) of several labels, or floats of numbers.
    An accuracy has its 95% confidence interval beside it. Of five classes or fewer there is no top-5 accuracy, which
    would be 1. Scores of several labels or numbers are means over them.

    Raises:
        UserError: A score is not finite.

    Example:
        >>> metrics = compute_metrics(EvalPrediction(np.array([[0.0, 2.0], [3.0, 1.0]]), np.array([1, 1])))
        >>> metrics["accuracy"], round(metrics["loss"], 4)
        (0.5, 1.1269)
    """
    labels, logits = cast(Any, evaluation.label_ids), np.asarray(evaluation.predictions, np.float32)
    kind = problem_type_of(labels)
    if lost := int((~np.isfinite(logits)).any(axis=1).sum()):
        raise UserError(
            f"The scores of {lost} of {len(labels)} images are not finite: the weights are damaged, the training has "
            "failed, or 16-bit numbers are too small (then give --fp16 false)."
        )
    if kind == "regression":
        return {"r2": float(r2_score(labels, logits)), "mae": float(mean_absolute_error(labels, logits))}
    if kind == "multi_label_classification":
        defined = [scores for scores in _label_scores(labels, logits) if scores]
        auroc, precision = np.mean(defined or [(math.nan, math.nan)], axis=0)
        present = np.flatnonzero(labels.any(axis=0))  # labels that no image has do not count, as classes below
        f1 = _scores(labels, logits > 0, present)[2] if len(present) else np.array(math.nan)
        return {
            "average_precision": float(precision),
            "auroc": float(auroc),
            "macro_f1": float(f1.mean()),
            "loss": float((np.logaddexp(0, logits) - labels * logits).mean(dtype=np.float64)),
        }
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    accuracies = TopKAccuracy(keep_in_memory=True, cache_dir=tempfile.gettempdir()).compute(
        predictions=ranked, references=labels
    )
    metrics = cast(dict[str, float], accuracies)
    if logits.shape[1] <= 5:
        del metrics["top5_accuracy"]
    for name in filter(metrics.__contains__, SHARES_OF_IMAGES):
        metrics[f"{name}_low"], metrics[f"{name}_high"] = wilson_interval(metrics[name], len(labels))
    # Classes that the images lack do not count: `balanced_accuracy_score` is this recall, but warns of them.
    _, recall, f1, _ = _scores(labels, ranked[:, 0], np.unique(labels))
    metrics |= {"balanced_accuracy": float(recall.mean()), "macro_f1": float(f1.mean())}
    losses = -np.take_along_axis(log_softmax(logits, axis=1), labels[:, None], axis=1)
    return {**metrics, "loss": float(losses.mean(dtype=np.float64))}


def _scores(labels: NDArray[Any], best: NDArray[Any], ids: Iterable[int]) -> tuple[NDArray[Any], ...]:
    """Return precision, recall, F1 and support of classes (N,) or labels (N, L); 0 where they are undefined."""
    if labels.ndim == 2:  # scikit-learn would take a single column for classes
        labels, best = (np.pad(each, ((0, 0), (0, 1))) for each in (labels, best))
    return precision_recall_fscore_support(labels, best, labels=list(ids), zero_division=0.0)


def _label_scores(labels: NDArray[Any], logits: NDArray[Any]) -> list[tuple[float, ...]]:
    """Return the AUROC and the average precision of each label; neither if all images have it, or none."""
    return [
        (float(roc_auc_score(has_it, score)), float(average_precision_score(has_it, score)))
        if 0 < has_it.sum() < len(has_it)
        else ()
        for has_it, score in zip(labels.T, logits.T, strict=True)
    ]


def detailed_report(logits: Any, labels: Any, label_names: list[str]) -> dict[str, Any]:
    """Report scores for each class, label or number, the confusion matrix of classes, and the calibration.

    Args:
        logits: Outputs of the model for N images, (N, L).
        labels: Targets (N, ...).
        label_names: Names of the L classes, labels or numbers.

    Returns:
        `problem_type` and `images`, their number N. `per_class`: precision, recall, f1-score and support of each class
        or label; of a label also its AUROC and average precision. `confusion_matrix`: L rows of L counts; a row is a
        true class, a column a predicted one. `calibration`: see `calibration`; of labels, the confidence is the
        probability of a label, and the accuracy how often an image has it. `per_number`: R2 and mean absolute error.
    """
    labels = np.asarray(labels)
    kind = problem_type_of(labels)
    report: dict[str, Any] = {"problem_type": kind, "images": len(labels)}
    if kind == "regression":
        both = (score(labels, logits, multioutput="raw_values") for score in (r2_score, mean_absolute_error))
        r2, mae = (np.broadcast_to(one, len(label_names)).tolist() for one in both)  # of one image, R2 is a NaN
        numbers = zip(label_names, r2, mae, strict=True)
        return {**report, "per_number": {name: {"r2": r2, "mae": mae} for name, r2, mae in numbers}}
    several, ids = kind == "multi_label_classification", list(range(len(label_names)))
    best = logits > 0 if several else logits.argmax(axis=1)
    # `classification_report` puts its averages among the classes, one of which may be named accuracy.
    scores = _scores(labels, best, ids)
    names = ("precision", "recall", "f1-score", "support")
    report["per_class"] = {
        label: dict(zip(names, map(float, of_class), strict=True))
        for label, *of_class in zip(label_names, *scores, strict=True)
    }
    if several:
        for row, rankings in zip(report["per_class"].values(), _label_scores(labels, logits), strict=True):
            row |= zip(("auroc", "average-precision"), rankings, strict=False)
        return {**report, "calibration": calibration(expit(logits).ravel(), labels.ravel() == 1)}
    report["confusion_matrix"] = confusion_matrix(labels, best, labels=ids).tolist()
    return {**report, "calibration": calibration(softmax(logits, axis=1).max(axis=1), best == labels)}


def calibration(confidence: NDArray[Any], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the expected calibration error (Guo et al. 2017, https://arxiv.org/abs/1706.04599, equation 3).

    And for each bin of confidence that has images, its upper edge, their number, their mean confidence and their
    accuracy.
    """
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:]
    upper = edges[np.digitize(confidence, edges, right=True)].round(4)
    answers = pd.DataFrame({"confidence_up_to": upper, "confidence": confidence.astype(float), "right": right})
    bins = answers.groupby("confidence_up_to", as_index=False).agg(
        images=("right", "size"), mean_confidence=("confidence", "mean"), accuracy=("right", "mean")
    )
    error = (bins["images"] * (bins["accuracy"] - bins["mean_confidence"]).abs()).sum() / len(right)
    return {"expected_calibration_error": float(error), "bins": bins.to_dict("records")}
