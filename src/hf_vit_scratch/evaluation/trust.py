"""How far the answers of a classifier can be trusted: calibrated scores, and images that it should not name.

What is found after training is saved beside the model as `trust.safetensors`, which `vit-scratch predict` reads.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import betabinom
from torch import Tensor
from transformers.utils import cached_file

from ..errors import blame_the_files
from .metrics import calibration

FILE = "trust.safetensors"
UNKNOWN = "unknown"  # the answer for an image that the model should not name
SHARE_OF_KNOWN = 0.99  # of the validation images, that are not too far from the training images
IMAGES_AT_ONCE = 1024  # whose distances are computed
LEAST_VARIANCE = 1e-8  # of the pooled vectors within a class
ABOVE_ALL_SCORES = 2.0
SPREAD_OF_TEMPERATURE = 0.5  # of its logarithm around 0, before images are seen


def fit_temperature(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the temperature by which logits (N, L) are divided, so that their softmax is calibrated.

    It has the least cross-entropy of the labels (N,), as in Guo et al. 2017 (https://arxiv.org/abs/1706.04599, section
    4.2). A prior keeps it near 1 if there are few images, or no mistakes.

    Example:
        >>> logits = np.tile([[4.0, 0.0]], (100, 1))
        >>> round(fit_temperature(logits, np.repeat([0, 1], [73, 27])), 1)  # right in 73%, and softmax says 98%
        3.3
    """
    logits = logits.astype(np.float64)

    def loss(log_temperature: float) -> float:
        scores = log_softmax(logits / math.exp(log_temperature), axis=1)
        prior = (log_temperature / SPREAD_OF_TEMPERATURE) ** 2 / 2
        return float(prior - scores[np.arange(len(labels)), labels].sum())

    return math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)


@dataclass
class Trust:
    """When a classifier should not name an image: its vector is far from all training images, or its score is low.

    The distance is that to the nearest training image (Sun et al. 2022, https://arxiv.org/abs/2204.06507, with one
    neighbor), measured as in Lee et al. 2018 (https://arxiv.org/abs/1807.03888, equation 2), with the covariance of
    Ledoit and Wolf 2004.

    Args:
        whitening: Factor of the inverse covariance of the pooled vectors within a class, (D, D).
        examples: Vectors of training images, times the whitening, (N, D).
        largest_distance: Largest distance to the nearest example at which an image is known.
        least_score: Least score of an answer, above 1 if no score is high enough.
        temperature: Divisor of the logits, from `fit_temperature`.
        calibration_error, error_before: Expected calibration error on the validation split, with it and without it.
        target_accuracy: Accuracy on the validation split for which `least_score` was chosen, if one was asked for.
        coverage: Share of the validation split that is answered.
        coverage_low, coverage_high: 95% interval of this share among as many new images (Angelopoulos and Bates
            2021, https://arxiv.org/abs/2107.07511, appendix C).
        accuracy: Accuracy of these answers, `None` if there are none.
    """

    whitening: Tensor
    examples: Tensor
    largest_distance: float = math.inf
    least_score: float = 0.0
    temperature: float = 1.0
    calibration_error: float = math.nan
    error_before: float = math.nan
    target_accuracy: float | None = None
    coverage: float = 1.0
    coverage_low: float = 0.0
    coverage_high: float = 0.0
    accuracy: float | None = None

    @classmethod
    def fit(
        cls,
        vectors: NDArray[Any],
        classes: NDArray[Any],
        validation: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
        target_accuracy: float | None = None,
    ) -> "Trust":
        """Fit it to images.

        Args:
            vectors: Pooled vectors of training images, (N, D).
            classes: Their classes, (N,).
            validation: Pooled vectors (M, D), logits (M, L) and classes (M,) of other images.
            target_accuracy: Accuracy that answers should have, or `None` for an answer to all known images.
        """
        from sklearn.covariance import LedoitWolf  # a third of a second, which only calibration needs

        found = np.unique(classes)
        means = np.stack([vectors[classes == number].mean(axis=0) for number in found]).astype(np.float64)
        within = vectors - means[np.searchsorted(found, classes)]
        covariance = LedoitWolf(assume_centered=True).fit(within).covariance_
        # The least variance is for classes of one image each, which have none.
        whitening = np.linalg.inv(np.linalg.cholesky(covariance + LEAST_VARIANCE * np.eye(len(covariance)))).T
        trust = cls(torch.from_numpy(whitening).float(), torch.from_numpy(vectors @ whitening).float())
        validation_vectors, logits, labels = validation
        right, trust.temperature = logits.argmax(axis=1) == labels, fit_temperature(logits, labels)
        scores = softmax(logits / trust.temperature, axis=1).max(axis=1)
        trust.calibration_error = calibration(scores, right)["expected_calibration_error"]
        trust.error_before = calibration(softmax(logits, axis=1).max(axis=1), right)["expected_calibration_error"]
        distances = trust.distances(torch.from_numpy(validation_vectors)).numpy()
        trust.largest_distance = float(np.quantile(distances, SHARE_OF_KNOWN))
        known = distances <= trust.largest_distance
        if target_accuracy is not None:
            order = np.argsort(-scores[known], kind="stable")
            accuracies = right[known][order].cumsum() / np.arange(1, known.sum() + 1)
            ends = np.diff(scores[known][order], append=-1) != 0  # equal scores are answered together
            reached = np.flatnonzero((accuracies >= target_accuracy) & ends)
            trust.target_accuracy = target_accuracy
            trust.least_score = float(scores[known][order][reached[-1]]) if len(reached) else ABOVE_ALL_SCORES
        answered = known & (scores >= trust.least_score)
        trust.coverage = float(answered.mean())
        number, count = len(labels), int(answered.sum())
        if count:
            trust.accuracy = float(right[answered].mean())
            new = betabinom(number, count, number + 1 - count)
            trust.coverage_low, trust.coverage_high = (new.ppf([0.025, 0.975]) / number).tolist()  # else both stay 0
        return trust

    def distances(self, vectors: Tensor) -> Tensor:
        """Return the distance of pooled vectors to the nearest training image.  (M, D) -> (M,)."""
        parts = (vectors.float() @ self.whitening).split(IMAGES_AT_ONCE)
        return torch.cat([torch.cdist(part, self.examples).amin(dim=1) for part in parts])

    def can_answer(self, score: float, vector: Tensor) -> bool:
        """Return whether the model should name an image with this best score and pooled vector (D,)."""
        return score >= self.least_score and self.distances(vector[None]).item() <= self.largest_distance

    def facts(self) -> dict[str, Any]:
        """Return the numbers, without the tensors."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}

    def save(self, folder: Path) -> None:
        """Write it beside a model."""
        tensors = {"whitening": self.whitening.contiguous(), "examples": self.examples.contiguous()}
        save_file(tensors, folder / FILE, metadata={"facts": json.dumps(self.facts())})

    @classmethod
    def load(cls, model: str) -> "Trust | None":
        """Load it from the folder of a model or from the Hub; `None` if the model has none."""
        path = cached_file(
            model, FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if path is None:
            return None
        damaged = f"{path} is damaged. To predict without the answer {UNKNOWN!r}, delete it"
        with blame_the_files(damaged), safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return cls(file.get_tensor("whitening"), file.get_tensor("examples"), **facts)
