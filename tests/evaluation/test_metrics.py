import math

import evaluate
import numpy as np
import pytest
import torch
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    precision_score,
    r2_score,
    recall_score,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch.nn import functional as F
from transformers import EvalPrediction

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.figures import plot_curves
from hf_vit_scratch.evaluation.metrics import compute_metrics, detailed_report


def logits_of(best, num_classes=None, confidence=0.9):
    """Return logits whose best class and its probability are these; the other classes share the rest."""
    num_classes = num_classes or int(np.max(best)) + 1
    confidence = np.broadcast_to(confidence, np.shape(best))[:, None]
    others = np.broadcast_to((1 - confidence) / (num_classes - 1), (len(best), num_classes))
    return np.log(np.where(np.arange(num_classes) == np.array(best)[:, None], confidence, others))


def test_accuracy_of_rankings_by_hand():
    ranking = [3, 1, 0, 2, 4, 5]  # from the best class to the worst
    logits = np.tile(-np.argsort(ranking).astype(float), (4, 1))

    metrics = compute_metrics(EvalPrediction(logits, np.array([3, 4, 5, 1])))

    assert (metrics["accuracy"], metrics["top5_accuracy"]) == (0.25, 0.75)


def test_of_classes_with_equal_scores_the_first_is_the_answer():
    logits, labels = np.zeros((7, 7)), np.arange(7)
    metrics = compute_metrics(EvalPrediction(logits, labels))
    assert (metrics["accuracy"], metrics["top5_accuracy"]) == (1 / 7, 5 / 7)
    assert detailed_report(logits, labels, [*"abcdefg"])["confusion_matrix"] == [[1] + [0] * 6] * 7


def test_single_label_is_reported_and_not_its_absence():
    labels, logits = np.array([[0], [0], [0], [1], [1]]), np.array([[-1.0], [-2.0], [1.0], [1.0], [-3.0]])

    row = detailed_report(logits, labels, ["defect"])["per_class"]["defect"]

    assert (row["precision"], row["recall"], row["f1-score"], row["support"]) == (0.5, 0.5, 0.5, 2)
    assert compute_metrics(EvalPrediction(logits, labels))["macro_f1"] == 0.5


def test_metrics_from_logits_match_scikit_learn():
    logits, labels = torch.randn(500, 12), torch.randint(0, 6, (500,)) ** 2 % 12  # rare classes, and some without any

    metrics = compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))

    best = logits.argmax(1)
    assert metrics["macro_f1"] == f1_score(labels, best, average="macro", labels=labels.unique())
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert metrics["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, best))

    expected = [top_k_accuracy_score(labels, logits, k=k, labels=np.arange(12)) for k in (1, 5)]
    assert [metrics["accuracy"], metrics["top5_accuracy"]] == expected
    assert metrics["loss"] == pytest.approx(
        log_loss(labels, logits.double().softmax(1), labels=np.arange(12)), rel=1e-6
    )


def test_interval_of_an_accuracy_is_wilsons():
    metrics = compute_metrics(EvalPrediction(logits_of([0] * 8 + [1] * 2), np.zeros(10, dtype=int)))

    # Brown, Cai and DasGupta 2001, equation 4, by hand: (8 + 1.92 -+ 1.96 sqrt(1.6 + 0.96)) / (10 + 3.84).
    assert [metrics["accuracy_low"], metrics["accuracy_high"]] == pytest.approx([0.4902, 0.9433], abs=1e-4)


def several_labels():
    logits = torch.randn(300, 4)
    return logits, ((logits + torch.randn(300, 4) > torch.tensor([0.0, 1.0, 2.0, 99.0])).to(torch.int8))


def test_metrics_of_several_labels_match_scikit_learn():
    logits, labels = several_labels()  # no image has the last label, so that no ranking of it is right or wrong

    metrics = compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))

    scores, defined = logits.sigmoid()[:, :3], labels[:, :3]
    assert metrics["auroc"] == pytest.approx(roc_auc_score(defined, scores, average="macro"))
    assert metrics["average_precision"] == pytest.approx(average_precision_score(defined, scores, average="macro"))
    assert metrics["macro_f1"] == pytest.approx(f1_score(defined, scores > 0.5, average="macro"))
    expected = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_report_of_several_labels_has_their_scores_and_calibration():
    logits, labels = several_labels()

    report = detailed_report(logits.numpy(), labels.numpy(), ["a", "b", "c", "d"])

    assert report["per_class"]["b"] == {
        "precision": precision_score(labels[:, 1], logits[:, 1] > 0),
        "recall": recall_score(labels[:, 1], logits[:, 1] > 0),
        "f1-score": f1_score(labels[:, 1], logits[:, 1] > 0),
        "support": labels[:, 1].sum(),
        "auroc": roc_auc_score(labels[:, 1], logits[:, 1]),
        "average-precision": average_precision_score(labels[:, 1], logits[:, 1]),
    }
    assert "auroc" not in report["per_class"]["d"]
    assert sum(bin["images"] for bin in report["calibration"]["bins"]) == 1200
    assert "confusion_matrix" not in report


def test_metrics_of_numbers_match_scikit_learn():
    labels = torch.randn(200, 2) * torch.tensor([1.0, 50.0]) + torch.tensor([0.0, 1990.0])
    outputs = labels + torch.randn(200, 2)

    metrics = compute_metrics(EvalPrediction(outputs.numpy(), labels.numpy()))
    report = detailed_report(outputs.numpy(), labels.numpy(), ["angle", "year"])

    assert metrics == {"r2": r2_score(labels, outputs), "mae": mean_absolute_error(labels, outputs)}
    assert report["per_number"]["year"] == {
        "r2": pytest.approx(r2_score(labels[:, 1], outputs[:, 1])),
        "mae": pytest.approx(mean_absolute_error(labels[:, 1], outputs[:, 1])),
    }


def test_single_image_of_numbers_has_errors_and_no_r2():
    with pytest.warns(UndefinedMetricWarning, match="not well-defined with less than two samples"):
        report = detailed_report(np.array([[1.0, 5.0]]), np.array([[1.5, 5.0]]), ["angle", "year"])

    assert [numbers["mae"] for numbers in report["per_number"].values()] == [0.5, 0.0]
    assert all(np.isnan(numbers["r2"]) for numbers in report["per_number"].values())


def test_fewer_than_five_classes():
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])

    metrics = compute_metrics(EvalPrediction(logits.numpy(), np.zeros(2, int)))

    assert metrics["accuracy"] == 0.5
    assert "top5_accuracy" not in metrics


def test_report_per_class_and_confusion_by_hand():
    best, labels = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 2, 2, 0])

    report = detailed_report(logits_of(best, 4), labels, ["cat", "dog", "cow", "emu"])

    assert report["confusion_matrix"] == [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    assert report["per_class"]["dog"] == {
        "precision": 1.0,
        "recall": 0.5,
        "f1-score": pytest.approx(2 / 3),
        "support": 2,
    }
    assert report["per_class"]["emu"]["support"] == 0


def test_class_may_be_named_as_an_average_is():
    per_class = detailed_report(logits_of([0, 0, 1, 1]), np.array([0, 1, 1, 1]), ["accuracy", "macro avg"])[
        "per_class"
    ]

    assert {name: row["support"] for name, row in per_class.items()} == {"accuracy": 1, "macro avg": 3}
    assert per_class["macro avg"]["recall"] == pytest.approx(2 / 3)


def test_calibration_by_hand():
    # Bins of 1/15: confidence 0.95 falls into the last, 0.52 into the eighth.
    logits = logits_of([0] * 4, 2, [0.95, 0.95, 0.52, 0.52])

    calibration = detailed_report(logits, np.array([0, 1, 0, 0]), ["a", "b"])["calibration"]

    assert [(b["confidence_up_to"], b["images"], b["accuracy"]) for b in calibration["bins"]] == [
        (0.5333, 2, 1.0), (1.0, 2, 0.5)
    ]  # fmt: skip
    assert calibration["expected_calibration_error"] == pytest.approx((2 * 0.48 + 2 * 0.45) / 4)


def test_calibrated_predictions_have_no_calibration_error():
    confidence = np.random.uniform(0.5, 1, 200_000)
    right = np.random.uniform(size=200_000) < confidence

    logits = logits_of(np.where(right, 0, 1), 2, confidence)
    report = detailed_report(logits, np.zeros(200_000, dtype=int), ["a", "b"])

    assert report["calibration"]["expected_calibration_error"] < 0.01
    assert sum(bin["images"] for bin in report["calibration"]["bins"]) == 200_000


def test_loss_of_confident_half_precision_logits_is_finite():
    logits = np.array([[200.0, -200.0]], np.float16)

    assert compute_metrics(EvalPrediction(logits, np.array([1])))["loss"] == 400
    assert F.cross_entropy(torch.from_numpy(logits).float(), torch.tensor([1])) == 400


def test_curves_leave_out_what_was_not_logged(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **kwargs: drawn.extend(figure.axes))

    plot_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], tmp_path / "curves.png")

    assert [axes.get_title() for axes in drawn if axes.axison] == ["loss"]


def test_classes_that_the_images_lack_do_not_count():
    logits = logits_of([0, 2, 1])  # one image is called 2, which none is

    metrics = compute_metrics(EvalPrediction(logits, np.array([0, 0, 1])))

    assert metrics["balanced_accuracy"] == 0.75
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 2]), torch.tensor([[0, 1, 0]] * 3), torch.randn(3, 3)])
def test_scores_that_are_not_finite_are_refused(labels):
    logits = np.random.randn(3, 3)
    logits[1, 0] = math.nan

    with pytest.raises(UserError, match=r"^The scores of 1 of 3 images are not finite: the weights are damaged"):
        compute_metrics(EvalPrediction(logits, labels.numpy()))


def test_one_number_per_image_may_be_given_without_an_axis():
    labels, logits = np.array([1.0, 2.0, 4.0], np.float32), np.array([[1.0], [2.5], [3.0]], np.float32)

    assert compute_metrics(EvalPrediction(logits, labels)) == compute_metrics(EvalPrediction(logits, labels[:, None]))


def test_metrics_need_no_cache_of_evaluate(monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", "/proc/nothing")  # cannot be made
    metrics = compute_metrics(EvalPrediction(logits_of([0], 2), np.array([0])))
    assert metrics["accuracy"] == 1
