"""Calibrated scores, and when a classifier should not answer."""

import json

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from scipy.special import softmax
from sklearn.covariance import LedoitWolf
from sklearn.metrics import log_loss

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.metrics import calibration
from hf_vit_scratch.evaluation.trust import FILE, Trust, fit_temperature


def overconfident(number, seed=0, factor=3.0, classes=4):
    """Logits whose softmax would be calibrated if they were divided by the factor, and labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=1.5, size=(number, classes))
    labels = np.array([rng.choice(classes, p=scores) for scores in softmax(logits, axis=1)])
    return factor * logits, labels


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_temperature_is_found(factor):
    assert fit_temperature(*overconfident(20_000, factor=factor)) == pytest.approx(factor, rel=0.03)


def test_temperature_has_the_least_cross_entropy_of_many():
    logits, labels = overconfident(5_000)
    temperature = fit_temperature(logits, labels)

    losses = {t: log_loss(labels, softmax(logits / t, axis=1)) for t in np.linspace(1, 6, 51)}

    assert abs(min(losses, key=losses.get) - temperature) < 0.1


def test_few_images_without_a_mistake_leave_scores_nearly_as_they_are():
    logits = np.array([[3.0, 0.0], [0.0, 3.0], [2.0, 0.0]])

    assert 0.85 < fit_temperature(logits, np.array([0, 1, 0])) < 0.95


def example(target=None, seed=0):
    """Three classes as clouds in 6 dimensions that differ in their spread, and a classifier of them."""
    rng = np.random.default_rng(seed)
    means, spread = 4 * np.eye(3, 6), np.diag([1, 1, 1, 2.0, 0.1, 0.1])

    def draw(number):
        classes = rng.integers(0, 3, number)
        return means[classes] + rng.normal(size=(number, 6)) @ spread, classes

    vectors, classes = draw(600)
    seen, true = draw(500)
    logits = 2 * seen[:, :3]
    return vectors, classes, seen, logits, true, Trust.fit(vectors, classes, (seen, logits, true), target)


def test_distance_is_that_of_mahalanobis_to_the_nearest_training_image(monkeypatch):
    monkeypatch.setattr("hf_vit_scratch.evaluation.trust.IMAGES_AT_ONCE", 7)
    vectors, classes, seen, *_, trust = example()
    means = np.stack([vectors[classes == number].mean(axis=0) for number in range(3)])
    precision = LedoitWolf(assume_centered=True).fit(vectors - means[classes]).precision_

    expected = [min(mahalanobis(vector, example, precision) for example in vectors) for vector in seen[:20]]

    actual = trust.distances(torch.from_numpy(seen[:20]))
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_all_but_one_percent_of_the_validation_images_are_known():
    *_, seen, _, _, trust = example()

    known = trust.distances(torch.from_numpy(seen)) <= trust.largest_distance

    assert known.sum() == 495


def test_what_is_unlike_all_images_is_unknown_whatever_its_score():
    *_, trust = example()

    assert trust.can_answer(0.4, torch.tensor([4.0, 0, 0, 0, 0, 0]))
    assert not trust.can_answer(1.0, torch.tensor([4.0, 0, 0, 0, 3.0, 0]))


def test_least_score_gives_the_wanted_accuracy_with_the_largest_coverage():
    _, _, seen, logits, true, trust = example(target=0.995)
    scores = softmax(logits / trust.temperature, axis=1).max(axis=1)
    right = logits.argmax(axis=1) == true
    known = trust.distances(torch.from_numpy(seen)).numpy() <= trust.largest_distance

    answered = known & (scores >= trust.least_score)

    assert right[answered].mean() == pytest.approx(trust.accuracy)
    assert trust.accuracy >= 0.995 > right[known].mean()
    assert answered.mean() == pytest.approx(trust.coverage)
    for lower in np.sort(scores[known & ~answered]):
        assert right[known & (scores >= lower)].mean() < 0.995


def test_equal_scores_are_answered_together():
    vectors, classes, seen, logits, true, _ = example()
    logits = np.tile([2.0, 0.0, 0.0], (len(true), 1))
    true = np.where(np.arange(len(true)) % 2, 0, 1)  # the first of equal scores may all be right, half of all are

    trust = Trust.fit(vectors, classes, (seen, logits, np.sort(true)), 0.9)

    assert (trust.coverage, trust.accuracy) == (0, None)


def test_coverage_holds_on_unseen_images():
    inside = 0
    for seed in range(100):
        *_, trust = example(target=0.99, seed=seed)
        _, _, seen, logits, _, _ = example(seed=100 + seed)
        scores = softmax(logits / trust.temperature, axis=1).max(axis=1)
        known = trust.distances(torch.from_numpy(seen)).numpy() <= trust.largest_distance
        share = np.mean(known & (scores >= trust.least_score))
        inside += trust.coverage_low <= share <= trust.coverage_high
    assert 93 <= inside < 100


def test_accuracy_out_of_reach_leaves_everything_unknown():
    vectors, classes, seen, logits, true, _ = example()
    trust = Trust.fit(vectors, classes, (seen, logits, (logits.argmax(axis=1) + 1) % 3), 0.9)

    assert (trust.coverage, trust.coverage_low, trust.coverage_high, trust.accuracy) == (0, 0, 0, None)
    assert json.loads(json.dumps(trust.facts(), allow_nan=False)) == trust.facts()
    assert not trust.can_answer(1.0, torch.tensor([4.0, 0, 0, 0, 0, 0]))


def test_calibration_errors_are_those_of_the_report():
    _, _, seen, logits, true, trust = example()
    right = logits.argmax(axis=1) == true

    before = calibration(softmax(logits, axis=1).max(axis=1), right)["expected_calibration_error"]
    after = calibration(softmax(logits / trust.temperature, axis=1).max(axis=1), right)["expected_calibration_error"]

    assert (trust.error_before, trust.calibration_error) == (before, after)


def test_class_without_training_images_is_no_hindrance():
    vectors, classes, seen, logits, true, _ = example()
    trust = Trust.fit(vectors[classes != 1], classes[classes != 1], (seen, logits, true))

    assert trust.distances(torch.from_numpy(seen)).isfinite().all()


def test_one_image_per_class_is_no_hindrance():
    *_, seen, logits, true, _ = example()
    trust = Trust.fit(np.eye(3, 6), np.arange(3), (seen, logits, true))

    assert trust.distances(torch.from_numpy(seen)).isfinite().all()


def test_saved_one_is_loaded(tmp_path):
    *_, trust = example(target=0.99)
    trust.save(tmp_path)

    loaded = Trust.load(str(tmp_path))

    assert loaded.facts() == trust.facts()
    assert torch.equal(loaded.whitening, trust.whitening)
    assert torch.equal(loaded.examples, trust.examples)
    assert (tmp_path / FILE).is_file()


def test_damaged_one_is_named(tmp_path):
    (tmp_path / FILE).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(
        UserError, match=r"trust\.safetensors is damaged\. To predict without the answer 'unknown', delete it"
    ):
        Trust.load(str(tmp_path))


def test_model_without_one_has_none(tmp_path):
    assert Trust.load(str(tmp_path)) is None
