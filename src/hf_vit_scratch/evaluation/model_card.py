"""Write model cards with the metadata that the Hub reads.

vit-scratch card RUN [RUN of another seed ...] --output model_cards/NAME.md
"""

import argparse
import json
import math
import platform
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import quote

import joblib
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..data.images import local_path
from ..errors import UserError
from ..model.configuration_vit_scratch import VARIANT_NAME, ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from .metrics import METRIC_NAMES, SHARES_OF_IMAGES, wilson_interval

TEMPLATE = Path(__file__).with_name("model_card_template.md")
NOUNS = {"single_label_classification": "classes", "multi_label_classification": "labels", "regression": "numbers"}
TITLES = {"top5_accuracy": "top-5 accuracy", "macro_f1": "macro-F1", "auroc": "AUROC", "r2": "R2",
          "average_precision": "mean average precision", "mae": "mean absolute error"}  # fmt: skip
LOGGED = (
    "epoch", "minutes", "loss", "eval_loss", "eval_accuracy", "eval_average_precision", "eval_r2", "learning_rate",
    "images_per_second",
)  # fmt: skip
MAX_LOG_ROWS = 20
GROUP_BY = ("--group_by", "--group-by")  # an expression, which may begin with a slash
MISTAKES = "mistakes.png"  # drawn by a run whose images may be shown
FIGURES = ("curves.png", "confusion_matrix.png", "reliability.png", "predictions.png", MISTAKES)
PACKAGES = ("torch", "torchvision", "transformers", "accelerate", "datasets")


def describe_machine() -> dict[str, str]:
    """Return the hardware and the versions of the libraries as text."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else []
    name = names[0] if names else platform.processor() or platform.machine()
    number = joblib.cpu_count()
    hardware = f"{number} core{'s' * (number > 1)} of {name}"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {hardware}"
    elif torch.backends.mps.is_available():
        hardware = f"Apple GPU, {hardware}"
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]
    return {"hardware": hardware, "versions": ", ".join(versions)}


def make_card(
    runs: Sequence[Path],
    output: Path,
    *,
    name: str | None = None,
    data: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """Write the card of a run, or of several that differ only in their seed, with its figures beside it.

    The details and the name are those of the first folder. `data` describes the images of a local folder; `license` is
    an identifier of the Hub, by default that of the run. `tags` are added to ours.
    """
    reports = [_read_report(run) for run in runs]
    if other := [run for run, report in zip(runs, reports, strict=True) if report["labels"] != reports[0]["labels"]]:
        raise UserError(f"{other[0]} learnt other labels than {runs[0]}. A card is for runs that differ in the seed.")
    log = json.loads((runs[0] / "log.json").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((runs[0] / "recipe.yaml").read_text(encoding="utf-8"))
    source, model = recipe.get("data", "digits"), recipe.get("model", "")
    dataset = source if reports[0]["data_is_on_the_hub"] else None
    description = data or dataset or ("the digits of scikit-learn" if source == "digits" else "local images")
    from_scratch = not model or VARIANT_NAME.fullmatch(model)
    kind, number = reports[0]["problem_type"], len(reports[0]["labels"])
    metric, noun = METRIC_NAMES[kind][0], NOUNS[kind]
    result = EvalResult(
        task_type="image-classification",
        dataset_type=dataset or "imagefolder",
        dataset_name=description,
        dataset_split=recipe.get("test_split") or "test",
        metric_type=metric,
        metric_value=round(sum(report[f"test_{metric}"] for report in reports) / len(reports), 6),
    )
    steps: dict[int, dict[str, Any]] = {}
    for line in log:
        steps.setdefault(line["step"], {}).update(line)
    rows = [line for line in steps.values() if "eval_loss" in line] or [line for line in log if "loss" in line]
    return _write_card(
        output,
        ViTScratchConfig.from_pretrained(runs[0]),
        {
            "model_name": name or runs[0].resolve().name,
            "license": license or recipe.get("license"),
            "pipeline_tag": "image-classification",
            "tags": ["vision", "vit", *(["trained-from-scratch"] if from_scratch else []), *tags],
            "datasets": [dataset] if dataset else None,
            "metrics": [metric],
            "eval_results": [result],
        },
        report=reports[0],
        reports=reports,
        learnt=f"{number} {noun if number > 1 else noun[:-1]}",
        results=results_of(reports),
        data=description,
        origin="trained from random weights" if from_scratch else f"fine-tuned from `{_without_folders(model)}`",
        # `train_runtime` is that of the last call alone; `minutes` go on after a resumption.
        seconds=max(logs.get("train_runtime", 60 * logs.get("minutes", 0)) for logs in log),
        commands=[shlex.join(_without_folders(shlex.split(report["command"]))) for report in reports],
        recipe=yaml.safe_dump(
            {flag: _without_folders([f"--{flag}", value])[1] for flag, value in recipe.items()}, sort_keys=False
        ).strip(),
        figures=_copy_figures(runs[0], output),
        columns=[column for column in LOGGED if any(column in row for row in rows)],
        log=rows[:: -math.ceil(len(rows) / MAX_LOG_ROWS) or -1][::-1],  # with the last row
    )


def make_run_card(
    trainer: Any, *, model_name: Any = None, license: Any = None, tags: Any = None, **_: Any
) -> ModelCard:
    """Write the card of a `ViTTrainer`'s run into its folder: that of `make_card` after a test, else a short one.

    Arguments as for `Trainer.create_model_card`.
    """
    run, task = Path(trainer.args.output_dir), trainer.args.task
    output, name, license = run / "README.md", model_name or run.resolve().name, license or trainer.args.license
    tags = [tags] if isinstance(tags, str) else tags or []
    is_tested = all((run / file).is_file() for file in ("metrics.json", "recipe.yaml"))  # by `vit-scratch train`
    if task == "image-classification" and not trainer.is_in_train and is_tested:
        return make_card([run], output, name=name, license=license, tags=tags)
    status = "This card has no test results."
    if trainer.is_in_train:
        status = "Its training goes on: these weights are not the last ones."
    elif task == "masked-image-modeling":
        status = "It was trained without labels, to reconstruct masked patches; other training can start from it."
    is_classifier = isinstance(trainer.model, ViTScratchForImageClassification)
    metadata = {
        "model_name": name,
        "license": license,
        "pipeline_tag": "image-classification" if is_classifier else "image-feature-extraction",
        "tags": ["vision", "vit", *tags],
    }
    return _write_card(output, trainer.model.config, metadata, status=status)


def _write_card(output: Path, config: ViTScratchConfig, metadata: dict[str, Any], **fields: Any) -> ModelCard:
    """Fill in the template and write the card."""
    data = ModelCardData(library_name="transformers", **metadata)
    card = ModelCard.from_template(
        data, template_path=str(TEMPLATE), config=config, model_name=metadata["model_name"], **fields
    )
    output.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return card


def _read_report(run: Path) -> dict[str, Any]:
    path = run / "metrics.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    others = ("log.json", "config.json")  # which a report of `evaluate` lacks
    if "problem_type" not in report or not all((run / name).is_file() for name in others):
        raise UserError(f"{run} holds no finished run of a classifier. Give the --output_dir of one.")
    return report


def results_of(reports: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the metrics of the test split by their titles: the mean of the runs, each run, and a 95% interval."""
    results, first = {}, reports[0]
    names = METRIC_NAMES[first["problem_type"]]
    titles = {name: f"test {TITLES.get(name, name.replace('_', ' '))}" for name in names}
    for name, title in {**titles, f"flip_{names[0]}": f"{titles[names[0]]} with the mirrored view"}.items():
        values = [report[f"test_{name}"] for report in reports if f"test_{name}" in report]
        if len(values) < len(reports):  # the views of some runs only
            continue
        scale, form, unit = (100, ".1f", "%") if name.endswith("accuracy") else (1, ".3f", "")
        form = ".4g" if name == "mae" and max(values) < 1000 else form  # an error has the size of the numbers
        mean = sum(values) / len(values)
        text = f"{scale * mean:{form}}{unit}"
        if len(values) > 1:
            text += f" ({', '.join(f'{scale * value:{form}}' for value in values)} in {len(values)} runs)"
        if name in SHARES_OF_IMAGES:
            low, high = wilson_interval(mean, first["images"])
            text += f", 95% interval {100 * low:.1f} to {100 * high:.1f}"
        results[title] = text
    if first["problem_type"] == "single_label_classification" and "per_class" in first:
        name, row = max(first["per_class"].items(), key=lambda item: item[1]["support"])
        results["for comparison"] = f"{row['support'] / first['images']:.1%} by always answering {name}"
    if first["problem_type"] == "multi_label_classification" and "per_class" in first:
        shares = [row["support"] / first["images"] for row in first["per_class"].values() if "auroc" in row]
        results["for comparison"] = f"mean average precision {sum(shares) / max(len(shares), 1):.3f} at random"
    if trust := first.get("trust"):
        error, before = trust["calibration_error"], trust["error_before"]
        results["calibration error"] = f"{error:.3f}, before calibration {before:.3f}, both on the validation split"
        if trust["target_accuracy"] is not None:
            right = "" if trust["accuracy"] is None else f", {trust['accuracy']:.1%} of them correctly"
            expected = f"expect {trust['coverage_low']:.0%} to {trust['coverage_high']:.0%} of new images"
            results["answered"] = f"{trust['coverage']:.1%} of the validation images{right}; {expected}"
    if "near_duplicates" in first:
        results["near duplicates"] = f"pairs: {first['near_duplicates']}, none of them in two splits"
    return results


def _copy_figures(run: Path, output: Path) -> dict[str, str]:
    """Copy the figures of a run beside its card, and return their file names."""
    prefix = "" if output.name == "README.md" else f"{output.stem}_"
    drawn = {file: output.with_name(prefix + file) for file in FIGURES if (run / file).is_file()}
    output.parent.mkdir(parents=True, exist_ok=True)
    for file, copy in drawn.items():
        with suppress(shutil.SameFileError):  # the card is in the folder of the run
            shutil.copyfile(run / file, copy)
    return {Path(file).stem: quote(copy.name) for file, copy in drawn.items()}


def _without_folders(value: Any) -> Any:
    """Replace an absolute path with its last name, because the card is published."""
    if isinstance(value, list):
        pairs = zip(["", *value], value, strict=False)
        return [one if before in GROUP_BY else _without_folders(one) for before, one in pairs]
    if not isinstance(value, str) or value.partition("=")[0] in GROUP_BY:
        return value
    flag, equals, text = value.partition("=") if value.startswith("--") else ("", "", value)
    path = PureWindowsPath(text)  # which knows the separators of all systems
    return flag + equals + (path.name or text if path.is_absolute() or text.startswith(("/", "~")) else text)


def main(argv: Sequence[str]) -> None:
    """Run `vit-scratch card`."""
    parser = argparse.ArgumentParser(
        prog="vit-scratch card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--output", type=local_path, required=True, help="Markdown file to write")
    parser.add_argument("--name", help="name of the model (default: that of the first folder)")
    parser.add_argument("--data", help="description of the images, if they came from a local folder")
    parser.add_argument("--license", help="license identifier of the Hub, such as apache-2.0 (default: the run's)")
    args = parser.parse_args(argv)
    if args.output.is_dir():
        raise UserError(f"--output must be a file, but {args.output} is a folder.")
    make_card(args.runs, args.output, name=args.name, data=args.data, license=args.license)
    print(f"{args.output} and its figures are written.")
