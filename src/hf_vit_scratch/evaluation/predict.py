"""The classes of images in files, folders and globs, as JSON lines or as a table.

    vit-scratch predict runs/digits photos --output photos.csv
    vit-scratch predict runs/digits a_digit.png 'photos/**/*.jpg' --top_k 1 | head

Of folders, however deep, and of globs the files with an image's suffix are taken; a file given by its name is taken
whatever its suffix. Results come in the order of the arguments, those of a folder or glob sorted; best class first:

    jsonl   {"image": PATH, "predictions": [{"label": NAME, "score": NUMBER}, ...]} for each image, on a line
            {"image": PATH, "error": WHY} for an image that cannot be decoded
    csv     one row for each image, with the columns image, label_1, score_1, label_2, ..., error; for an image that
            cannot be decoded, only image and error are filled

Until all is done, --output FILE is called FILE.partial. An image that cannot be decoded is named on standard error and
passed over. The exit code is 0, or 1 if there was such an image, or 2 if the command cannot be carried out.
"""

import argparse
import csv
import glob
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from huggingface_hub.utils import tqdm  # the usual one, but silent after `disable_progress_bar`
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification, ImageClassificationPipeline, pipeline
from transformers.utils import logging as transformers_logging

from ..data.images import SUFFIXES, decode_image, find_image_files, warn_of_others
from ..errors import UserError
from ..speed.linear import use_faster_linear

PROGRAM = "vit-scratch predict"


class _PreparedBatches(torch.utils.data.Dataset):
    """For each batch of paths, what to say of each image, and the model's inputs for those that can be decoded."""

    def __init__(self, paths: Sequence[str], batch_size: int, image_processor: Any, dtype: torch.dtype):
        self.paths = paths
        self.batch_size = batch_size
        self.image_processor = image_processor
        self.dtype = dtype

    def __len__(self) -> int:
        return math.ceil(len(self.paths) / self.batch_size)

    def __getitem__(self, batch: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        results, prepared = [], []
        for path in self.paths[batch * self.batch_size : (batch + 1) * self.batch_size]:
            try:
                image = decode_image({"path": path, "bytes": None}, path)
            except UserError as error:
                results.append({"image": path, "error": str(error).removesuffix(" Delete or replace it.")})
            else:  # one by one, as photographs of 24 megapixels are large; and as the pipeline's `preprocess` does it
                results.append({"image": path})
                prepared.append(self.image_processor(images=image, return_tensors="pt").to(self.dtype))
        names = prepared[0] if prepared else ()
        return results, {name: torch.cat([inputs[name] for inputs in prepared]) for name in names}


def find_images(names: Sequence[str]) -> list[str]:
    """The paths of files by their names, and of the images in folders, however deep, and of globs; each once.

    Raises:
        UserError: A name leads to nothing.
    """
    found: dict[str, None] = {}
    for name in names:
        path = Path(name).expanduser()
        files = [str(path)]
        if path.is_dir():
            found_in, others = find_image_files(path)
            warn_of_others(path, others)
            files = [str(file) for file in found_in]
        elif not path.is_file():
            matches = map(Path, glob.iglob(str(path), recursive=True))
            files = sorted(str(file) for file in matches if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            what = "folder holds no" if path.is_dir() else "is no file or folder, and as a glob it matches no"
            raise UserError(f"{name}: this {what} image. Give files, folders, or globs in quotes.")
        found |= dict.fromkeys(files)
    return list(found)


def load_classifier(model: str, device: str | None = None) -> ImageClassificationPipeline:
    """The pipeline of a saved image classifier, for `predict`. Code that a model brings along is never executed.

    Args:
        model: A folder as `train.py` leaves it, or a name on the Hub.
        device: Such as `"cpu"` or `"cuda:1"`; `None` for the accelerator if there is one.

    Raises:
        UserError: There is no such device or model, or it is no image classifier with its image processor.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{model} holds no config.json. Give the folder of a saved model.")
    # A missing run is not looked for on the Hub, where `runs/digits` would be a fine name.
    in_folder = folder.parent != Path() and folder.parent.is_dir()
    if not folder.is_dir() and (in_folder or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model)):
        raise UserError(f"{model} is no folder, and no name on the Hub. Give the folder of a saved model.")
    source, where = (str(folder), "") if folder.is_dir() else (model, "is no folder, and from the Hub it ")
    with _in_one_sentence(f"--device {device}"):
        torch.empty(0, device=device)
    with _in_one_sentence(f"{model} {where}cannot be loaded as an image classifier"):
        classifier, report = AutoModelForImageClassification.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
        image_processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    wrong = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if wrong:  # they are random numbers now
        raise UserError(f"{model} is no image classifier: its {wrong[0]} is missing or of another shape.")
    use_faster_linear(classifier)
    return pipeline("image-classification", model=classifier, image_processor=image_processor, device=device)


@contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # the libraries raise many types, down to an AssertionError for a missing device
        reason = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
        raise UserError(f"{what}: {reason} ({type(error).__name__}).") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def predict(
    classifier: ImageClassificationPipeline,
    paths: Sequence[str],
    *,
    top_k: int = 5,
    batch_size: int = 32,
    num_workers: int = 0,
) -> Iterator[dict[str, Any]]:
    """Classify images one batch after the other; the scores are those of transformers' pipeline.

    Args:
        classifier: From `load_classifier`.
        paths: Files of the images.
        top_k: How many classes to give, best first; at most all.
        batch_size: Images that the model computes at once.
        num_workers: Processes that decode; 0 for the main process.

    Yields:
        For each path in its order `image`, the path, and either `predictions`, each a `label` and a `score`, or
        `error`, why it cannot be decoded.
    """
    batches = _PreparedBatches(paths, batch_size, classifier.image_processor, classifier.model.dtype)
    for results, inputs in DataLoader(batches, batch_size=None, num_workers=num_workers):
        logits = iter(classifier.forward(inputs)["logits"] if inputs else ())
        for result in results:
            if "error" not in result:
                result["predictions"] = classifier.postprocess({"logits": next(logits)[None]}, top_k=top_k)
            yield result


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """The file, under another name until all is written; without one standard output."""
    if output is None:
        cast(Any, sys.stdout).reconfigure(errors="surrogateescape")  # for names of files that are not UTF-8
        yield sys.stdout
        return
    if output.is_dir():
        raise UserError(f"--output {output} is a folder. Give the name of a file.")
    special = output.exists() and not output.is_file()  # such as /dev/null
    partial = output if special else output.with_name(f"{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("w", encoding="utf-8", errors="surrogateescape", newline="")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error}.") from error
    with file:
        yield file
    if not special:
        partial.replace(output)


def _writer(file: TextIO, table: bool, top_k: int) -> Callable[[dict[str, Any]], Any]:
    """A function that writes a result as a row of a table, or as a line of JSON."""
    if not table:
        return lambda result: file.write(f"{json.dumps(result)}\n")
    columns = ["image", *(f"{name}_{rank + 1}" for rank in range(top_k) for name in ("label", "score")), "error"]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()

    def write_row(result: dict[str, Any]) -> None:
        ranked = enumerate(result.pop("predictions", ()), 1)
        writer.writerow(result | {f"{name}_{rank}": best[name] for rank, best in ranked for name in best})

    return write_row


def main(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a folder that train.py has left, or a name on the Hub")
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders, and globs in quotes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of standard output")
    parser.add_argument("--format", choices=("jsonl", "csv"), help="csv for an --output of this suffix, else jsonl")
    parser.add_argument("--top_k", type=int, default=5, help="classes per image, at most all (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=32, help="images computed at once (%(default)s)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that decode images (%(default)s)")
    parser.add_argument("--device", help="such as cpu or cuda:1; the accelerator if there is one")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, as outside a terminal")
    args = parser.parse_args(argv)
    try:
        for name, least in (("top_k", 1), ("batch_size", 1), ("num_workers", 0)):
            if getattr(args, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}.")
        num_broken = _predict_into_file(args)
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its exit
        return 141  # as a shell says it: 128 + SIGPIPE
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 1 if num_broken else 0


def _predict_into_file(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of broken images."""
    paths = find_images(args.images)
    if args.quiet or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # the bar of loading too
    classifier = load_classifier(args.model, args.device)
    table = (args.format or ("csv" if args.output and args.output.suffix.lower() == ".csv" else "jsonl")) == "csv"
    top_k, num_broken = min(args.top_k, classifier.model.config.num_labels), 0
    with _opened(args.output) as file:
        write = _writer(file, table, top_k)
        results = predict(classifier, paths, top_k=top_k, batch_size=args.batch_size, num_workers=args.num_workers)
        # Lines that go to the terminal are progress enough, and a bar would break them.
        in_terminal = args.output is None and sys.stdout.isatty()
        for result in tqdm(results, total=len(paths), unit="image", disable=in_terminal or None):
            if "error" in result:
                num_broken += 1
                tqdm.write(f"{PROGRAM}: {result['error']}", file=sys.stderr)
            write(result)
            file.flush()
    if num_broken:
        print(f"{PROGRAM}: {num_broken} of {len(paths)} images cannot be decoded", file=sys.stderr)
    return num_broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
