"""Export a classifier for ONNX Runtime, OpenVINO or plain PyTorch, and prove that it answers as before.

    vit-scratch export runs/my_photos --format onnx           write runs/my_photos/onnx
    vit-scratch export runs/my_photos --format onnx --int8    smaller and faster, but not quite the same
    python runs/my_photos/onnx/predict.py photo.jpg           needs onnxruntime and Pillow only

The exported model takes RGB images, uint8 (B, height, width, 3) of any size, and returns a score for each class. Its
preprocessing and calibration are inside.

The command then compares it with transformers' pipeline: on the test images of the run (or on --data), at most 10,000,
and on odd ones. It fails if the answers differ beyond a bound. The figures are in export.json. Other flags are those
of `vit-scratch evaluate`.
"""

import json
import logging
import shlex
import shutil
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from PIL import Image

from ..conversion.export import FILES, PACKAGES, export, labels_and_type, refuse_missing_packages
from ..conversion.export_proof import BATCH, milliseconds, prove
from ..data import exported
from ..data.images import images_of, local_path
from ..data.splits import with_names
from ..data.targets import targets_of
from ..errors import UserError
from ..evaluation.model_card import describe_machine, results_of
from ..evaluation.predict import load_classifier, refuse_other_models
from .evaluate import load_rows, open_run, parser_of_runs

logger = logging.getLogger(__name__)

MOST_IMAGES = 10_000  # of the proof
CALIBRATION_IMAGES = 256
LARGEST_SIDE = 512  # of the images of calibration and measurement, in pixels


def main(argv: Sequence[str]) -> None:
    """Run `vit-scratch export`."""
    usage = "MODEL --format {onnx,openvino,pt2} [--int8] [--data DATA] [--split SPLIT] [--output_dir DIR]"
    parser = parser_of_runs("export", usage, __doc__)
    parser.add_argument("--format", choices=FILES, required=True, help="for ONNX Runtime, OpenVINO or torch.export")
    parser.add_argument("--int8", action="store_true", help="compute in 8-bit integers, chosen by validation images")
    parser.add_argument("--output_dir", type=local_path, metavar="DIR", help="new folder (default: MODEL/FORMAT)")
    given, flags = parser.parse_known_args(argv)
    folder = given.output_dir or local_path(given.run) / (given.format + "-int8" * given.int8)
    _refuse_options(given)
    args, recipe, run = open_run(given.run, given.data, flags, folder)
    refuse_missing_packages(given.format)
    classifier: Any = load_classifier(given.run, device="cpu")
    refuse_other_models(classifier.model)
    classifier.model.float()
    (labels, kind), loaded = labels_and_type(classifier.model.config), DatasetDict()

    def sample(data: str | None, split: str | None, most: int) -> Dataset:
        source, rows = load_rows(args, recipe, run, data, split, loaded)
        rows = with_names(source, rows, labels, kind)
        return rows.shuffle(args.training.seed).select(range(min(len(rows), most)))

    chosen = rows = sample(given.data, given.split, MOST_IMAGES)
    if given.int8 and run is not None:
        try:
            chosen = sample(None, "validation", CALIBRATION_IMAGES)
        except UserError as error:
            if given.data is None:
                raise
            logger.warning("%s The 8-bit integers are chosen by %s instead.", error, given.data)
    calibration = [reduced(image)[None] for image in islice(images_of(chosen), CALIBRATION_IMAGES * given.int8)]
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)  # the libraries tell of each step
    try:
        path = export(classifier, folder, given.format, calibration)
    finally:
        logging.disable(logging.NOTSET)
    classify = exported.load(path)
    proof = prove(classifier, classify, images_of(rows), targets_of(rows), given.int8)
    image = reduced(next(images_of(rows)))
    facts = {
        "model": path.name,
        "labels": labels,
        "problem_type": kind,
        "command": shlex.join(["vit-scratch", "export", *argv]),
        "megabytes": sum(file.stat().st_size for file in folder.glob("model.*")) / 1e6,
        **proof,
        "milliseconds": {
            f"{number} image{'s' * (number > 1)}": milliseconds(classifier, classify, np.stack([image] * number))
            for number in (1, BATCH)
        },
        **describe_machine(),
    }
    (folder / "export.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    shutil.copy(exported.__file__, folder / "predict.py")
    (folder / "requirements.txt").write_text("\n".join(_requirements(given.format)) + "\n", encoding="utf-8")
    files = ", ".join(sorted(file.name for file in folder.iterdir()))
    print(f"\n{summary(facts)}\nFiles      {folder}: {files}")
    if facts["faults"]:
        raise UserError(f"The export does not answer as the model does: {'; '.join(facts['faults'])}.")


def _requirements(format: str) -> list[str]:
    """Return what an exported model needs, as pip reads it."""
    package = PACKAGES[format][-1]
    runtime = packages_distributions().get(package, [package])[0]  # onnxruntime-gpu holds onnxruntime, too
    return [f"{runtime}=={version(runtime).partition('+')[0]}", "pillow", *(["numpy"] if format == "pt2" else [])]


def _refuse_options(given: Namespace) -> None:
    if given.output_dir is None and not local_path(given.run).exists():
        raise UserError(f"{given.run} is not a local folder, so the export has no default folder. Give --output_dir.")
    if given.int8 and given.format == "pt2":
        raise UserError("--int8 is for --format onnx and openvino.")


def reduced(image: Image.Image) -> NDArray[np.uint8]:
    """Return an image as an array (height, width, 3), reduced to a side that a batch in memory can have."""
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return np.array(image)


def summary(facts: dict[str, Any]) -> str:
    """Return what `export.json` says as a few lines."""
    metric, kind, lines = facts["metric"], facts["problem_type"], [f"Size         {facts['megabytes']:.2f} MB"]
    for name in ("pipeline", "export"):
        report = {"problem_type": kind, "images": facts["test"]["images"], f"test_{metric}": facts[name][metric]}
        lines += [f"{name.title():13}{title} {text}" for title, text in results_of([report]).items()]
    for name in ("test", "odd"):
        found = facts[name]
        changed = f"{found['answers_changed']} of {found['images']} answers change; "
        changed = "" if kind == "regression" else changed
        lines.append(f"{name.title() + ' images':13}{changed}scores differ by up to {found['largest_difference']:.1e}")
    for batch, times in facts["milliseconds"].items():
        each = "; ".join(f"{name} {time:.2f} ms" for name, time in times.items())
        lines.append(f"Time         {batch}, to scores: {each}")
    return "\n".join(lines)
