"""Report on labelled images, as a run reports on its test split at its end.

    vit-scratch evaluate runs/my_photos --output_dir report                    its own test split, once more
    vit-scratch evaluate runs/my_photos --data new_photos --output_dir report  other images
    vit-scratch evaluate runs/my_photos/onnx/model.onnx --output_dir report    an exported model

The report is metrics.json, confusion_matrix.png, reliability.png, _answers.csv and mistakes.png. Of images that are
not public, the last is called _mistakes.png, and is never uploaded. Classes are matched by their names; the data may
lack some of the model's classes.

Other flags are those of `vit-scratch train` for images and for computing, such as --per_device_eval_batch_size 64,
--corrupt_images skip, --label_column NAME, --eval_tta flip and --use_cpu true. Without them, the model computes as in
the run. Those that say how to compute do not apply to an exported model.
"""

import argparse
import json
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, disable_progress_bars
from transformers.trainer_utils import PredictionOutput
from transformers.utils.logging import disable_progress_bar

from ..conversion.export import FILES, labels_and_type
from ..conversion.export_proof import evaluate_scores, scores_of_export
from ..data import exported
from ..data.dataset import BatchTransform, ImageClassificationDataset
from ..data.images import images_of, is_local, local_path
from ..data.options import DataArguments
from ..data.splits import absolute, count_learnt, find_split, load_split, with_names
from ..data.targets import targets_of
from ..errors import UserError, blame_the_files, blame_the_user
from ..evaluation.metrics import compute_metrics
from ..evaluation.predict import load_classifier, refuse_other_models
from ..evaluation.report import predict_split, summary, write_report
from ..speed import hardware
from . import steps
from .arguments import Arguments
from .recipe import FACTS, RECIPE, Recipe, parse_recipe
from .run_directory import refuse_place_among_images
from .trainer import ViTTrainer

logger = logging.getLogger(__name__)

# What a run may have asked for, but is for training only. The Trainer's own label smoothing would also look at labels.
OFF = ["--push_to_hub", "false", "--torch_compile", "false", "--report_to", "none", "--label_smoothing_factor", "0"]


def main(argv: Sequence[str]) -> None:
    """Run `vit-scratch evaluate`."""
    usage = "MODEL --output_dir DIR [--data DATA] [--split SPLIT]"
    parser = parser_of_runs("evaluate", usage, __doc__)
    parser.add_argument(
        "--output_dir", type=local_path, required=True, metavar="DIR", help="new folder, outside the run's"
    )
    given, flags = parser.parse_known_args(argv)
    args, recipe, run = open_run(given.run, given.data, flags, given.output_dir)
    is_export = Path(given.run).suffix in {Path(name).suffix for name in FILES.values()}
    if run is not None and given.output_dir.resolve().is_relative_to(run.resolve()):
        raise UserError(f"{given.output_dir} is in the folder of the run, whose files are pushed. Choose another.")
    refuse_place_among_images(given.output_dir, given.data or args.data.data)
    labels, kind, predict = _open_export(given.run) if is_export else _open_model(given.run, args, recipe)
    source, rows = load_rows(args, recipe, run, given.data, given.split)
    rows = with_names(source, rows, labels, kind)
    outputs, output_dir = predict(rows), given.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    report = write_report(outputs, rows, source, shlex.join(["vit-scratch", "evaluate", *argv]), output_dir)
    print(f"\n{summary(report, len(rows))}\nFiles      {output_dir}: metrics.json, _answers.csv and figures")


def parser_of_runs(command: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command for a saved model and labelled images; others are those of training."""
    parser = argparse.ArgumentParser(
        prog=f"vit-scratch {command}",
        usage=f"vit-scratch {command} {usage} [--flag value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = "folder of a run, or of another saved model of this package"
    parser.add_argument("run", metavar="MODEL", help=f"{kinds}; to evaluate, also the file of an export")
    parser.add_argument("--data", help="images with labels, as for `vit-scratch train` (default: those of the run)")
    parser.add_argument("--split", help="split of the data (default: test, or all images if there are no splits)")
    return parser


def open_run(
    model: str, data: str | None, flags: Sequence[str], output_dir: Path
) -> tuple[Arguments, Recipe, Path | None]:
    """Return the arguments and the recipe of the run that a saved model belongs to, and its folder, if any."""
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.glob("[!.]*"))):
        raise UserError(f"{output_dir} is not empty. Choose another --output_dir, or delete it.")
    path = local_path(model)
    folder = path.parent if path.is_file() else path  # of an export
    # The folders of checkpoints and exports are in that of their run.
    run = next((place for place in (folder, folder.resolve().parent) if (place / RECIPE).is_file()), None)
    if not path.exists() and is_local(model):
        raise UserError(f"{model}: there is no such file or folder. Give a saved model, or the file of an export.")
    if run is None and data is None:
        raise UserError(f"{model} holds no {RECIPE}, so its own images are not known. Give --data, and MODEL first.")
    name = "your_images" if run is None else str(run / RECIPE)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    disable_progress_bar()  # those of loading
    disable_progress_bars()  # of each step of `datasets`
    args, recipe = parse_recipe([name, *flags, *OFF, "--output_dir", str(output_dir)])
    if idle := [
        name for name in recipe.values("flag") if not any(hasattr(part, name) for part in (args.data, args.training))
    ]:
        raise UserError(f"--{idle[0]} changes nothing in a trained model. Leave it out.")
    return args, recipe, run


def load_rows(
    args: Arguments,
    recipe: Recipe,
    run: Path | None,
    data: str | None,
    split: str | None,
    loaded: DatasetDict | None = None,
) -> tuple[str, Dataset]:
    """Return the source of the images to evaluate, and the images: of a split of the run itself, or of other data.

    The splits of the run's own data are cut as the run cut them, so that no training image is in the test split. For
    a further call they are kept in `loaded`.
    """
    facts = None if run is None else Recipe.load(run)
    begun = facts or Recipe()
    is_there = begun.data != "" and local_path(begun.data).exists()  # the project may have been moved
    own = begun.data if is_there else args.data.data
    is_unknown = run is not None and facts is None and local_path(own).exists() and own != "digits"
    if is_unknown and data is None:
        raise UserError(
            f"{run} has no {FACTS}, as when it was loaded from the Hub, so which of {own} it was trained on is not "
            f"known. Give --data with other images to test on, or --data {own} --split test if that has such a split."
        )
    if is_unknown and split is None and absolute(str(data)) == absolute(own):
        logger.warning("%s: the run was trained on some of these images. Its accuracy on them is too high.", data)
    if data is not None and (is_unknown or absolute(data) != absolute(own)):
        # Its columns need not be those of the run.
        flags = {name: value for name, value in recipe.values("flag").items() if hasattr(args.data, name)}
        flags |= {"data": data, "streaming": False, "group_by": args.data.group_by}
        rows = load_split(DataArguments(**flags), split)
        if number := 0 if run is None else count_learnt(run, rows):
            logger.warning(
                "%s: %d of the %d images have the names and sizes of training images of %s. Its accuracy on them is "
                "too high.", data, number, len(rows), run,
            )  # fmt: skip
        return data, rows
    args.data.data = own
    splits = DatasetDict() if loaded is None else loaded
    if not splits:
        new = steps.load_data(args)
        if run is not None and not args.data.streaming:  # the images of a stream are not known
            steps.check_images(run, begun, new)
        splits |= new
    rows = splits[find_split(own, split or "test", splits)]
    if not isinstance(rows, Dataset):
        raise UserError(f"{own}: --split {split} is a stream of unknown length. Choose another split.")
    return own, rows


# The names of a model's classes or numbers, what they are, and a function that evaluates rows.
Opened = tuple[list[str], str, Callable[[Dataset], PredictionOutput]]


def _open_model(model: str, args: Arguments, recipe: Recipe) -> Opened:
    classifier: Any = load_classifier(model)
    refuse_other_models(classifier.model)
    hardware.choose(args.training, recipe.settings.keys())

    def predict(rows: Dataset) -> PredictionOutput:
        dataset = ImageClassificationDataset(rows, BatchTransform(classifier.image_processor))
        with blame_the_user():
            trainer = ViTTrainer(
                model=classifier.model,
                args=args.training,
                eval_dataset=dataset,
                compute_metrics=compute_metrics,
            )
        return predict_split(trainer, dataset)

    return *labels_and_type(classifier.model.config), predict


def _open_export(model: str) -> Opened:
    file = local_path(model)
    with blame_the_files(f"{model} cannot be loaded"):
        facts = json.loads(file.with_name("export.json").read_text(encoding="utf-8"))
        classify = exported.load(file)

    def predict(rows: Dataset) -> PredictionOutput:
        labels = targets_of(rows)
        logits, metrics = evaluate_scores(scores_of_export(classify, images_of(rows)), labels)
        return PredictionOutput(logits, labels, {f"test_{name}": value for name, value in metrics.items()})

    return facts["labels"], facts["problem_type"], predict
