"""Classify the images in files, folders and globs, as JSON lines or as a table.

    vit-scratch predict runs/digits photos --output photos.csv
    vit-scratch predict runs/digits a_digit.png "photos/**/*.jpg" --top_k 1 | head

In folders, at any depth, and in globs, the files with the suffix of an image are classified. A file given by its name
is classified whatever its suffix. Results keep the order of the arguments; a folder or a glob is sorted by path.

    jsonl   {"image": PATH, "answer": NAME, "predictions": [{"label": NAME, "score": NUMBER}, ...]} for each image,
            best class first, or each number under its name, in the order of the model
            {"image": PATH, "error": WHY} for an image that cannot be decoded
    csv     the columns image, answer, label_1, score_1, label_2, ..., error; for an image that cannot be decoded, only
            image and error are filled. A model that was trained on numbers has a column for each of them instead

The answer is the best class, or "unknown" if the image is unlike the training images of every class, or if its score
is too low for the --target_accuracy of the run. Models that were not calibrated have no answer.

An image that cannot be decoded is named on standard error and skipped. The exit code is 0, or 1 if there was such an
image, or 2 if the command cannot be carried out.
"""

import argparse
import csv
import glob
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from huggingface_hub.utils import tqdm  # silent after `disable_progress_bar`, unlike tqdm's own
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification, ImageClassificationPipeline, pipeline
from transformers.utils import logging as transformers_logging

from ..data.images import ADVICE, SUFFIXES, decode_image, find_image_files, is_local, local_path, warn_of_others
from ..data.options import check_ranges
from ..errors import UserError, blame_the_files
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from ..speed.hardware import use_no_more_threads_than_cores
from ..speed.optimize import example_batch_for, optimize
from .trust import UNKNOWN, Trust

PROGRAM = "vit-scratch predict"


def _prepare(
    paths: Sequence[str], image_processor: Any, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return one result for each image, and the model's inputs for those that can be decoded."""
    results, prepared = [], []
    for path in paths:
        try:
            image = decode_image({"path": path, "bytes": None}, path)
        except UserError as error:
            results.append({"image": path, "error": str(error).removesuffix(ADVICE)})
        else:  # one by one, because a photograph may have 24 megapixels
            results.append({"image": path})
            prepared.append(image_processor(images=image, return_tensors="pt").to(dtype))
    if len({inputs[next(iter(inputs))].shape for inputs in prepared}) > 1:
        raise UserError("The model's image processor leaves images of different sizes. Give --batch_size 1.")
    names = prepared[0] if prepared else ()
    return results, {name: torch.cat([inputs[name] for inputs in prepared]) for name in names}


def find_images(names: Sequence[str]) -> list[str]:
    """Return the paths of files, of the images in folders at any depth, and of those that globs match, each once.

    Raises:
        UserError: A name leads to no image.
    """
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        path = local_path(name)
        files = [path]
        if path.is_dir():
            files, others = find_image_files(path, warn=True)
            warn_of_others(path, others)
        elif not path.is_file():
            matches = sorted(map(Path, glob.iglob(str(path), recursive=True)))
            files = [file for file in matches if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not files:
            raise UserError(f"{name}: no image found. Give files, folders that hold images, or globs in quotes.")
        found |= dict.fromkeys(map(str, files))
    return list(found)


def load_classifier(model: str, device: str | None = None) -> ImageClassificationPipeline:
    """Load an image classifier as a pipeline, as `load_pipeline` does."""
    return load_pipeline("image-classification", AutoModelForImageClassification, "image classifier", model, device)


def load_pipeline(task: str, auto_class: Any, kind: str, model: str, device: str | None) -> Any:
    """Load a model from a folder, or from the Hub, as a pipeline. Code beside it is never executed.

    Without a device such as `"cuda:1"`, it runs on the accelerator, if there is one.
    """
    folder = local_path(model)
    if not folder.is_dir() and is_local(model):
        raise UserError(f"{model} is not a folder. Give the folder of a saved model, or a name on the Hub.")
    if (folder / "last").is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{model} holds a run that is not finished. Resume it, or give {folder / 'last'}.")
    source = str(folder) if folder.is_dir() else model
    use_no_more_threads_than_cores()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    with blame_the_files(f"--device {device} cannot be used"):
        torch.empty(0, device=device)
    with blame_the_files(f"{model} cannot be loaded as an {kind}"):
        loaded, report = auto_class.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
        image_processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    wrong = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if wrong:  # transformers has filled them with random numbers
        raise UserError(f"{model} is not an {kind}: its {wrong[0]} is missing or of another shape.")
    if (channels := getattr(loaded.config, "num_channels", 3)) != 3:
        raise UserError(f"{model} is for images with num_channels {channels}, but every image is read as RGB.")
    return pipeline(cast(Any, task), model=loaded, image_processor=image_processor, device=device)


def refuse_other_models(model: Any) -> None:
    """Raise a `UserError` unless a model is a classifier of this package, perhaps from the code beside its weights."""
    ours, names = ViTScratchForImageClassification.__name__, [cls.__name__ for cls in type(model).__mro__]
    if ours not in names:
        raise UserError(f"The model must be a {ours}, got {names[0]}. Convert it with `vit-scratch convert`.")


def predict(
    classifier: ImageClassificationPipeline,
    paths: Sequence[str],
    *,
    top_k: int = 5,
    batch_size: int = 32,
    num_workers: int = 0,
    trust: Trust | None = None,
) -> Iterator[dict[str, Any]]:
    """Classify image files in batches. The scores are those of transformers' pipeline.

    Threads must not share a classifier: load one for each.
    The model computes `batch_size` images at once. They are decoded by `num_workers` processes, or by this one. The
    `top_k` likeliest classes are given, or all numbers.

    Yields:
        For each path, in order, `image`, the path, and either `predictions`, each with `label` and `score`, or
        `error`, the reason why it cannot be decoded. With `trust`, also `answer`, the best label or `"unknown"`.
    """
    outputs = ("logits",) if trust is None else ("logits", "pooler_output")
    config = classifier.model.config
    numbers = list((config.id2label or {}).values()) if config.problem_type == "regression" else []
    for result in forward(classifier, outputs, paths, batch_size, num_workers):
        if (logits := result.pop("logits", None)) is not None:
            predictions = classifier.postprocess({"logits": logits[None]}, top_k=len(numbers) or top_k)
            if numbers:  # the pipeline sorts by value
                predictions.sort(key=lambda prediction: numbers.index(prediction["label"]))
            if trust is not None:
                answers = trust.can_answer(predictions[0]["score"], result.pop("pooler_output"))
                result["answer"] = predictions[0]["label"] if answers else UNKNOWN
            result["predictions"] = predictions
        yield result


@contextmanager
def classes_by_number(config: Any) -> Iterator[dict[int, str]]:
    """Let a pipeline call classes by their numbers, and yield their names: two may have one, as ImageNet's cranes."""
    names = config.id2label
    config.id2label = {number: str(number) for number in names}
    try:
        yield names
    finally:
        config.id2label = names


def forward(
    loaded: Any, outputs: Sequence[str], paths: Sequence[str], batch_size: int, num_workers: int
) -> Iterator[dict[str, Any]]:
    """Yield, as `predict` does, for each image file outputs of a pipeline's model, such as `logits`, or `error`."""
    encoded: dict[str, Any] = {}  # the output of the encoder, which a classifier keeps to itself

    def keep(module: Any, args: Any, output: Any) -> None:
        if isinstance(output, dict):  # timm's models return a tensor
            encoded.update(output)

    prepare = partial(_prepare, image_processor=loaded.image_processor, dtype=loaded.model.dtype)
    with ExitStack() as stack:
        is_optimized = any("products" in vars(module) for module in loaded.model.modules())
        if hasattr(loaded.model.config, "image_height_width") and not is_optimized:  # a model of this package
            example = example_batch_for(loaded.model, min(batch_size, len(paths)))
            stack.callback(optimize(loaded.model, example, images=len(paths)).undo)
        stack.enter_context(loaded.model.base_model.register_forward_hook(keep))
        for results, inputs in DataLoader(cast(Any, paths), batch_size, num_workers=num_workers, collate_fn=prepare):
            of_images: Any = iter(())
            if inputs:
                computed = loaded.forward(inputs)
                computed = {**encoded, **computed}
                if missing := [name for name in outputs if computed.get(name) is None]:
                    raise UserError(f"{type(loaded.model).__name__} returns no {missing[0]}. Use a model that does.")
                of_images = zip(*(computed[name].cpu() for name in outputs), strict=True)
            for result in results:
                yield result if "error" in result else result | dict(zip(outputs, next(of_images), strict=True))


def _table_row(result: dict[str, Any], are_numbers: bool) -> dict[str, Any]:
    """Return a result of `predict` as a row of the table: numbers by their names, or classes by their ranks."""
    row = {name: value for name, value in result.items() if name != "predictions"}
    for rank, prediction in enumerate(result.get("predictions", ()), 1):
        ranked = {f"{name}_{rank}": value for name, value in prediction.items()}
        row |= {prediction["label"]: prediction["score"]} if are_numbers else ranked
    return {name: f"{value:.7g}" if isinstance(value, float) else value for name, value in row.items()}


def model_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that runs a saved model."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a saved model, or a name on the Hub")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the accelerator if there is one)")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of a command that reads image files and has an `--output`, and the files."""
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders, and globs in quotes")
    parser.add_argument("--batch_size", type=int, default=32, help="images computed at once (%(default)s)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that decode images (%(default)s)")
    args = parser.parse_args(argv)
    check_ranges(args)
    if args.output is not None and args.output.is_dir():
        raise UserError(f"--output must be a file, but {args.output} is a folder.")
    images = find_images(args.images)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)  # before the model is loaded, for it may fail
    return args, images


def name_broken(
    program: str, results: Iterable[dict[str, Any]], number: int, disable: bool | None = None
) -> Iterator[dict[str, Any]]:
    """Yield results under a progress bar. Name the images that cannot be decoded, and count them at the end."""
    num_broken = 0
    for result in tqdm(results, total=number, unit="image", disable=disable):
        if "error" in result:
            num_broken += 1
            tqdm.write(f"{program}: {result['error']}", file=sys.stderr)
        yield result
    if num_broken:
        print(f"{program}: {num_broken} of {number} images cannot be decoded", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Run `vit-scratch predict`; return the exit code."""
    parser = model_parser(PROGRAM, __doc__)
    formats = "a table if it ends in .csv, else JSON lines (default: screen)"
    parser.add_argument("--output", type=local_path, metavar="FILE", help=formats)
    parser.add_argument("--top_k", type=int, default=5, help="classes per image, at most all (%(default)s)")
    args, paths = parse(parser, argv)
    classifier = load_classifier(args.model, args.device)
    is_table = args.output is not None and args.output.suffix.lower() == ".csv"
    config, exit_code, answers = classifier.model.config, 0, Counter[str]()
    are_numbers, ranks = config.problem_type == "regression", range(min(args.top_k, config.num_labels))
    columns = [f"{name}_{rank + 1}" for rank in ranks for name in ("label", "score")]
    if are_numbers:
        columns = list((config.id2label or {}).values())
    is_adapted = hasattr(classifier.model, "peft_config")  # its vectors are other ones than its base model's
    trust = None if is_adapted else Trust.load(str(classifier.model.name_or_path))
    results = predict(
        classifier, paths, top_k=args.top_k, batch_size=args.batch_size, num_workers=args.num_workers, trust=trust
    )
    # Lines on the terminal show the progress, and a bar would break them.
    in_terminal = args.output is None and sys.stdout.isatty()
    output: AbstractContextManager[TextIO] = nullcontext(sys.stdout)
    if args.output is not None:
        # The names of files may not be UTF-8.
        output = args.output.open("w", encoding="utf-8", errors="surrogateescape", newline="")
    with output as file:
        names = dict.fromkeys(["image", *(["answer"] if trust else []), *columns, "error"])  # numbers may be called so
        table = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        if is_table:
            table.writeheader()
        for result in name_broken(PROGRAM, results, len(paths), in_terminal or None):
            exit_code |= "error" in result
            if "answer" in result:
                answers[result["answer"]] += 1
            table.writerow(_table_row(result, are_numbers)) if is_table else print(json.dumps(result), file=file)
            file.flush()
    if args.output is not None:
        listed = "".join(f", {number} {answer}" for answer, number in answers.most_common(10))
        print(f"{args.output}: {len(paths)} images{listed}", file=sys.stderr)
    return exit_code
