"""Prove that an exported model answers as its pipeline does, and measure how much faster it is."""

import copy
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.special import logit
from transformers import EvalPrediction, ImageClassificationPipeline

from ..data.exported import read_image
from ..data.targets import ProblemType
from ..errors import UserError
from ..evaluation.metrics import METRIC_NAMES, compute_metrics, problem_type_of
from ..evaluation.predict import classes_by_number
from ..speed.optimize import example_batch_for, optimize

Classify = Callable[[NDArray[Any]], NDArray[Any]]  # images, uint8 (B, height, width, 3) -> scores (B, L)

BATCH = 32
MOST_PIXELS = 2 * 10**7  # of a batch, which the exported model resizes in float64
LARGEST_DIFFERENCE = 1e-3  # of scores, in float32
MOST_CHANGED = 0.001  # of the answers, in float32
MOST_LOST = 0.005  # of the metric, by 8-bit integers
SMALLEST_SCORE = 1e-12  # less is taken for it, because rounding may leave 0
FEW_IMAGES = 3  # an 8-bit export may always lose so many
ROUNDS, SECONDS = 5, 0.2  # of the measurement; the seconds for each variant and round


def odd_images() -> Iterator[bytes]:
    """Yield files of colored images that differ in shape, size, mode and orientation, for example 1x1 pixels."""
    rng = np.random.default_rng(0)
    modes = {"RGB": (1, 1), "L": (50, 80), "RGBA": (64, 48), "P": (33, 20)}
    sizes = [*modes.items(), ("RGB", (9, 700)), ("RGB", (600, 7)), ("RGB", (1500, 2000)), ("RGB", (61, 47))]
    for mode, (height, width) in sizes:
        coarse = rng.integers(0, 256, (max(1, height // 12), max(1, width // 12), 3), dtype=np.uint8)
        pixels = np.asarray(Image.fromarray(coarse).resize((width, height))).astype(np.int64)
        noisy = np.clip(pixels + rng.integers(-40, 41, pixels.shape), 0, 255).astype(np.uint8)
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = 6  # turned by a quarter
        Image.fromarray(noisy).convert(mode).save(file, "PNG", exif=exif)
        yield file.getvalue()


def scores_of_pipeline(classifier: ImageClassificationPipeline, images: Sequence[Image.Image]) -> NDArray[Any]:
    """Return the scores (B, L) of a pipeline for images, in the order of the model's classes."""
    with classes_by_number(classifier.model.config) as names:
        answers: Any = classifier(list(images), top_k=len(names), batch_size=len(images))
    scores = [{int(answer["label"]): answer["score"] for answer in of_image} for of_image in answers]
    return np.array([[of_image[number] for number in range(len(names))] for of_image in scores])


def scores_of_export(classify: Classify, images: Iterable[Image.Image]) -> NDArray[Any]:
    """Return the scores (N, L) of an exported model for upright RGB images, in batches of one size."""
    groups = (group for batch in batched(images) for _, group in groupby(map(np.array, batch), key=np.shape))
    return np.concatenate([classify(np.stack([*group])) for group in groups])


def batched(images: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield batches of images, smaller ones if the images are large."""
    batch: list[Any] = []
    for image in images:
        batch.append(image)
        if len(batch) == BATCH or sum(math.prod(image.size) for image in batch) > MOST_PIXELS:
            yield batch
            batch = []
    if batch:
        yield batch


def evaluate_scores(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], dict[str, float]]:
    """Return the logits of scores (N, L), and the metrics, for targets (N, ...)."""
    kind, logits = problem_type_of(labels), scores.astype(np.float64)
    if kind == "single_label_classification":
        logits = np.log(logits.clip(SMALLEST_SCORE))
    elif kind == "multi_label_classification":
        logits = logit(logits.clip(SMALLEST_SCORE, 1 - SMALLEST_SCORE))
    return logits, compute_metrics(EvalPrediction(logits, labels))


def compare(theirs: NDArray[Any], ours: NDArray[Any], kind: ProblemType, scale: Any) -> dict[str, Any]:
    """Return the largest difference of scores (N, L), in units of a scale, and how many images change their answer."""
    if kind == "multi_label_classification":
        changed = ((ours > 0.5) != (theirs > 0.5)).any(axis=1)
    else:
        changed = (ours.argmax(axis=1) != theirs.argmax(axis=1)) & (kind != "regression")
    return {"largest_difference": float(np.abs((ours - theirs) / scale).max()), "answers_changed": int(changed.sum())}


def prove(
    classifier: ImageClassificationPipeline,
    classify: Classify,
    images: Iterable[Image.Image],
    labels: NDArray[Any],
    is_int8: bool,
) -> dict[str, Any]:
    """Compare an exported model with its pipeline, on N labelled images and on odd ones.

    Args:
        classifier: The pipeline, on the CPU, in float32.
        classify: The exported model.
        images: Upright RGB images.
        labels: Their targets (N, ...).
        is_int8: Whether the model computes in 8-bit integers. Then the metric has a bound, if it exists, and scores
            have none.

    Returns:
        `test` and `odd`, the results of `compare` with the number of `images`; `metric`, and the metrics of the
        `pipeline` and of the `export`; `faults`, what is beyond a bound.
    """
    config, faults = classifier.model.config, list[str]()
    kind = problem_type_of(labels)
    files = [*odd_images()]
    odd = (
        scores_of_pipeline(classifier, [Image.open(io.BytesIO(file)) for file in files]),
        scores_of_export(classify, [Image.fromarray(read_image(io.BytesIO(file))) for file in files]),
    )
    batches = [(scores_of_pipeline(classifier, batch), scores_of_export(classify, batch)) for batch in batched(images)]
    theirs, ours = (np.concatenate(scores) for scores in zip(*batches, strict=True))
    if not np.isfinite(ours).all():
        raise UserError("The export does not answer as the model does: its scores are not finite.")
    before, after = (evaluate_scores(scores, labels)[1] for scores in (theirs, ours))
    metric, most_lost = METRIC_NAMES[kind][0], max(MOST_LOST, FEW_IMAGES / len(labels))
    proof: dict[str, Any] = {"metric": metric, "pipeline": before, "export": after}
    if is_int8 and np.isfinite(before[metric]) and not before[metric] - after[metric] <= most_lost:
        faults.append(f"{metric} falls from {before[metric]:.4f} to {after[metric]:.4f}, by more than {most_lost:.4f}")
    for name, scores in (("test", (theirs, ours)), ("odd", odd)):
        proof[name] = {"images": len(scores[0]), **compare(*scores, kind, config.label_scale or 1.0)}
        difference, changed = proof[name]["largest_difference"], proof[name]["answers_changed"]
        if not is_int8 and not difference <= LARGEST_DIFFERENCE:
            faults.append(f"scores of {name} images differ by up to {difference:.2g}, more than {LARGEST_DIFFERENCE}")
        if not is_int8 and changed > MOST_CHANGED * len(scores[0]):
            faults.append(f"{changed} of {len(scores[0])} answers to {name} images change")
    return {**proof, "faults": faults}


def milliseconds(
    classifier: ImageClassificationPipeline, classify: Classify, images: NDArray[Any]
) -> dict[str, float]:
    """Measure how long an exported model takes from images to scores, beside its pipeline; medians of rounds in turn.

    The pipeline's image processor and model are measured, with the model plain and as `optimize` leaves it.
    """
    model, fast = cast(Any, classifier.model), copy.deepcopy(classifier.model)
    optimize(fast, example_batch_for(fast, len(images)))

    def run(model: Any) -> None:
        inputs = cast(Any, classifier.image_processor)(images=[*images], return_tensors="pt")
        model(**inputs).logits.softmax(-1).numpy()

    variants: dict[str, Callable[[], Any]] = {
        "PyTorch": lambda: run(model),
        "optimized PyTorch": lambda: run(fast),
        "export": lambda: classify(images),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, variant in variants.items():
                variant()  # the threads of the last variant still wait for work
                start = end = time.perf_counter()
                while end - start < SECONDS or end == start:
                    variant()
                    times[name].append(time.perf_counter() - end)
                    end = time.perf_counter()
    return {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
