"""Runs on every kind of labels, from their table to their report."""

import csv
import json
import re
import shutil
import warnings

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, r2_score, roc_auc_score
from test_train_script import SMALL, train
from transformers import AutoImageProcessor, pipeline

import vit_scratch
from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.data import dataset
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.data.targets import targets_of
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training import sanity_check, steps
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.recipe import parse_recipe

SHORT = [*SMALL, "--num_attention_heads", "2", "--num_hidden_layers", "1", "--logging_steps", "2"]


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder of 160 digits in class folders 0 and 1, and their names, labels and pictures."""
    root = tmp_path_factory.mktemp("digits")
    rows = load_digits()["train"].filter(lambda row: row["label"] < 2).select(range(160))
    rows = sorted(zip(map(str, rows["label"]), rows["image"], strict=True), key=lambda row: row[0])
    names = []
    for number, (label, image) in enumerate(rows):
        names.append(f"{label}/{number:03}.png")
        (root / label).mkdir(exist_ok=True)
        image.save(root / names[-1])
    return root, names, [label for label, _ in rows], [image for _, image in rows]


def write_rows(path, rows):
    """Write rows as JSON lines, in another order than that of their paths."""
    order = np.random.default_rng(1).permutation(len(rows))
    path.write_text("".join(json.dumps(rows[place]) + "\n" for place in order))
    return path


def run(data, output_dir, *flags):
    return train.main(["digits", *SHORT, "--data", str(data), "--output_dir", str(output_dir), *flags])


def choose(data, *flags):
    """Make the choices of a run, which it logs, and do not train."""
    args, recipe = parse_recipe(["digits", *SHORT, "--data", str(data), *flags])
    steps.make_choices(args, recipe, steps.load_data(args))


def weights(run):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run / "model.safetensors").items()}


def test_folders_tables_and_parquet_give_the_same_weights_to_the_last_bit(digits, tmp_path):
    root, names, labels, pictures = digits
    order = np.random.default_rng(0).permutation(len(names))
    columns = {"file_name": names, "label": labels}
    mixed = Dataset.from_dict({name: [values[place] for place in order] for name, values in columns.items()})
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["0", "1"])})
    Dataset.from_dict({"image": pictures, "label": labels}, features=features).to_parquet(tmp_path / "images.parquet")
    folder = shutil.copytree(root, tmp_path / "table")  # test_tables.py has the other tables
    mixed.to_csv(folder / "metadata.csv")
    sources = [root, tmp_path / "images.parquet", folder]

    for number, source in enumerate(sources):
        run(source, tmp_path / f"run_{number}", "--max_steps", "3", "--eval_strategy", "no", "--save_strategy", "no",
            "--calibrate", "false")  # fmt: skip

    first, *others = (weights(tmp_path / f"run_{number}") for number in range(len(sources)))
    assert len(others) == 2
    assert all(other == first for other in others)


TRAINED = ["--num_train_epochs", "12", "--learning_rate", "4e-3", "--per_device_train_batch_size", "32",
           "--eval_steps", "0.5", "--save_steps", "0.5", "--load_best_model_at_end", "true",
           "--rotation_degrees", "0", "--translate", "0", "--scale", "0"]  # fmt: skip


@pytest.fixture(scope="session")
def several(digits, tmp_path_factory):
    """A run on pairs of digits, each with the labels of both, and its table."""
    root, folder = tmp_path_factory.mktemp("several"), tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(240):
        pair = rng.integers(0, len(digits[1]), 2)
        Image.fromarray(np.hstack([np.asarray(digits[3][place]) for place in pair])).save(folder / f"{number}.png")
        present = {digits[2][place] for place in pair}
        rows.append({"file_name": f"{number}.png", "zero": int("0" in present), "one": int("1" in present)})
    table = write_rows(folder / "table.jsonl", rows)
    argv = [table, root / "run", *TRAINED, "--label_column", "zero", "one", "--mixup_alpha", "0.2",
            "--label_smoothing_factor", "0.1", "--seed", "3"]  # fmt: skip
    return argv, run(*argv)


@pytest.fixture(scope="session")
def numbers(digits, tmp_path_factory):
    """A run that learns how much ink there is, in units far from 1, and its table."""
    root, folder = tmp_path_factory.mktemp("numbers"), tmp_path_factory.mktemp("ink")
    rows = []
    for number, image in enumerate(digits[3]):
        image.save(folder / f"{number}.png")
        ink = float(np.asarray(image).mean())
        rows.append({"file_name": f"{number}.png", "price": 3e5 + 1e3 * ink, "share": 1e-5 * ink})
    table = write_rows(folder / "table.jsonl", rows)
    argv = [table, root / "run", *TRAINED, "--label_column", "price", "share"]
    return argv, run(*argv)


def targets_and_logits(argv, columns):
    """The targets of the test split, and what the saved model answers to its images, one by one."""
    rows = load_splits(str(argv[0]), label_column=columns)["test"]  # whatever the seed of the run
    model = ViTScratchForImageClassification.from_pretrained(argv[1]).eval()
    processor = AutoImageProcessor.from_pretrained(argv[1])
    with torch.no_grad():
        logits = [model(**processor(image.convert("RGB"), return_tensors="pt")).logits[0] for image in rows["image"]]
    return targets_of(rows), torch.stack(logits)


def test_metrics_of_several_labels_are_scikit_learns_on_the_raw_predictions(several):
    argv, metrics = several
    targets, logits = targets_and_logits(argv, ["zero", "one"])

    assert metrics["test_auroc"] == pytest.approx(roc_auc_score(targets, logits))
    assert metrics["test_average_precision"] == pytest.approx(average_precision_score(targets, logits))
    assert metrics["test_macro_f1"] == pytest.approx(f1_score(targets, logits.sigmoid() > 0.5, average="macro"))
    assert metrics["test_auroc"] > 0.8  # 0.5 by chance


def test_metrics_of_numbers_are_scikit_learns_and_scale_and_offset_do_not_matter(numbers):
    argv, metrics = numbers
    targets, outputs = targets_and_logits(argv, ["price", "share"])

    assert metrics["test_r2"] == pytest.approx(r2_score(targets, outputs), abs=1e-4)
    report = json.loads((argv[1] / "metrics.json").read_text())
    assert report["per_number"]["price"]["mae"] == pytest.approx(
        np.abs(targets - outputs.numpy())[:, 0].mean(), rel=1e-3
    )
    assert min(number["r2"] for number in report["per_number"].values()) > 0.5  # 0 for the mean as the answer
    assert report["test_loss"] < 0.5  # of standardized numbers


@pytest.mark.parametrize(
    ("kind", "card", "figures"),
    [
        (
            "several",
            ["| test mean average precision | ", "24 test images, 2 labels |", "| zero | "],
            ["reliability.png"],
        ),
        ("numbers", ["| test R2 | ", "16 test images, 2 numbers |", "| price | "], ["predictions.png"]),
    ],
)
def test_report_and_card_suit_the_labels(kind, card, figures, request):
    argv, _ = request.getfixturevalue(kind)
    text = (argv[1] / "README.md").read_text()

    for part in card:
        assert part in text
    files = {path.name for path in argv[1].iterdir()}
    assert {*figures, "curves.png", "_mistakes.png"} <= files
    assert {*re.findall(r"!\[.*?\]\((.*?)\)", text)} == {*figures, "curves.png"}  # no mistakes of a local folder
    assert "test accuracy" not in text


def test_what_is_learnt_and_the_best_model_are_said(several, tmp_path, caplog):
    caplog.set_level("INFO")
    argv, _ = several
    short = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]

    run(argv[0], tmp_path / "run", *argv[2:], *short)

    assert "metric_for_best_model average_precision: any of 2 labels for each image" in caplog.text
    assert (
        "192 train, 24 validation, 24 test; any of 2 labels for each image: zero, one; training on cpu" in caplog.text
    )


@pytest.mark.parametrize("kind", ["several", "numbers"])
def test_run_is_resumed_with_the_same_bits(kind, request, tmp_path):
    argv, _ = request.getfixturevalue(kind)
    folder = shutil.copytree(argv[1], tmp_path / "run", symlinks=True)
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    shutil.rmtree(last)
    for path in folder.glob("*.safetensors"):
        path.unlink()

    run(argv[0], folder, *argv[2:], "--resume_from_checkpoint", "true")

    assert weights(folder) == weights(argv[1])


def test_predictions_of_several_labels_are_probabilities(several, capsys):
    argv, _ = several
    image = argv[0].with_name("0.png")

    assert vit_scratch.main(["predict", str(argv[1]), str(image)]) == 0

    (result,) = map(json.loads, capsys.readouterr().out.splitlines())
    pipe = pipeline("image-classification", model=str(argv[1]), device="cpu")
    assert result["predictions"] == [
        {"label": best["label"], "score": pytest.approx(best["score"], abs=1e-5)} for best in pipe(str(image))
    ]
    assert pipe.model.config.problem_type == "multi_label_classification"  # by which the pipeline takes sigmoids


def test_predicted_numbers_have_a_column_each(numbers, tmp_path):
    argv, _ = numbers
    image = argv[0].with_name("0.png")

    assert vit_scratch.main(["predict", str(argv[1]), str(image), "--output", str(tmp_path / "table.csv")]) == 0

    with (tmp_path / "table.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["image", "price", "share", "error"]
    scores = pipeline("image-classification", model=str(argv[1]), device="cpu")(str(image))
    (price,) = (score["score"] for score in scores if score["label"] == "price")
    assert float(row["price"]) == pytest.approx(price, rel=1e-5)


@pytest.mark.parametrize("kind", ["several", "numbers"])
def test_evaluation_of_the_runs_own_test_split_is_that_of_the_run(kind, request, tmp_path):
    argv, metrics = request.getfixturevalue(kind)
    columns = argv[argv.index("--label_column") + 1 :][:2]
    own = json.loads((argv[1] / "metrics.json").read_text())

    assert vit_scratch.main(["evaluate", str(argv[1]), "--output_dir", str(tmp_path / "own")]) == 0
    report = json.loads((tmp_path / "own" / "metrics.json").read_text())
    assert report["test_loss"] == metrics["test_loss"]
    assert report["labels"] == columns
    data = ["--data", str(shutil.copy(argv[0], tmp_path / "table.jsonl")), "--label_column", *columns]
    shutil.copytree(argv[0].parent, tmp_path, dirs_exist_ok=True)
    assert vit_scratch.main(["evaluate", str(argv[1]), *data, "--output_dir", str(tmp_path / "all")]) == 0
    report = json.loads((tmp_path / "all" / "metrics.json").read_text())
    assert report["images"] > own["images"]


@pytest.mark.parametrize("kind", ["several", "numbers"])
def test_check_looks_at_any_labels(kind, request, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sanity_check, "SECONDS", 0.1)
    monkeypatch.setattr(sanity_check, "TRIAL_SECONDS", 1.0)
    argv, _ = request.getfixturevalue(kind)

    run(argv[0], tmp_path / "run", *argv[2:], "--check", "true")

    printed = capsys.readouterr().out
    expected = {"several": "images of 2 classes, from", "numbers": "128 images, price from 3"}[kind]
    assert expected in printed
    assert "of 64 training images after" in printed
    assert (tmp_path / "run" / "_samples.png").is_file()


# Classes of which some are rare


@pytest.fixture(scope="session")
def rare(digits, tmp_path_factory):
    """A folder with 72 zeros and 6 ones."""
    root = tmp_path_factory.mktemp("rare")
    for label, most in (("0", 72), ("1", 6)):
        (root / label).mkdir()
        for name in [name for name in digits[1] if name.startswith(label)][:most]:
            shutil.copy(digits[0] / name, root / name)
    return root


def test_balanced_accuracy_and_macro_f1_are_scikit_learns_and_choose_the_best_model(rare, tmp_path):
    metrics = run(rare, tmp_path / "run", *TRAINED, "--metric_for_best_model", "balanced_accuracy",
                  "--balanced_sampling", "true")  # fmt: skip
    targets, logits = targets_and_logits([rare, tmp_path / "run"], None)

    assert metrics["test_balanced_accuracy"] == balanced_accuracy_score(targets, logits.argmax(1))
    assert metrics["test_macro_f1"] == f1_score(targets, logits.argmax(1), average="macro")
    low, high = metrics["test_accuracy_low"], metrics["test_accuracy_high"]
    assert low < metrics["test_accuracy"] <= high
    state = json.loads((tmp_path / "run" / "best" / "trainer_state.json").read_text())
    logged = [logs["eval_balanced_accuracy"] for logs in state["log_history"] if "eval_balanced_accuracy" in logs]
    assert state["best_metric"] == max(logged)


def test_balanced_sampling_is_resumed_with_the_same_bits_by_any_number_of_workers(rare, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "DECODED_BYTES_KEPT", 0)  # kept images would leave nothing to do for the workers
    flags = ["--max_steps", "6", "--save_steps", "3", "--eval_strategy", "no", "--balanced_sampling", "true",
             "--per_device_train_batch_size", "16", "--mixup_alpha", "0.4"]  # fmt: skip
    folder = tmp_path / "run"
    run(rare, folder, *flags)
    whole = weights(folder)
    shutil.rmtree(folder / "checkpoint-6")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # on a machine of one core
        run(rare, folder, *flags, "--dataloader_num_workers", "2", "--resume_from_checkpoint", "true")

    assert weights(folder) == whole


def test_numbers_of_a_starting_model_keep_their_units(numbers, tmp_path):
    argv, _ = numbers
    config = ViTScratchForImageClassification.from_pretrained(argv[1]).config
    table = [json.loads(line) for line in argv[0].read_text().splitlines()]
    other = [row | {name: 3 * row[name] for name in config.label2id} for row in table]
    shutil.copytree(argv[0].parent, tmp_path / "data")
    data = write_rows(tmp_path / "data" / "other.jsonl", other)
    short = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]

    train.main(["finetune", "--data", str(data), "--output_dir", str(tmp_path / "run"), "--model", str(argv[1]),
                *argv[2:], *short])  # fmt: skip

    new = ViTScratchForImageClassification.from_pretrained(tmp_path / "run").config
    assert (new.label_mean, new.label_scale) == (config.label_mean, config.label_scale)


@pytest.mark.parametrize("images", [8, 9])
def test_too_few_images_of_a_class_are_pointed_out(images, digits, tmp_path, caplog):
    for split, number in (("train", images), ("validation", 1), ("test", 1)):
        for name in [name for label in "01" for name in [n for n in digits[1] if n.startswith(label)][:number]]:
            (tmp_path / "data" / split / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(digits[0] / name, tmp_path / "data" / split / name)

    choose(tmp_path / "data")

    assert ("There are 8 training images per class or label on average, too few" in caplog.text) == (images == 8)


def test_rare_class_is_pointed_out_unless_something_is_done_about_it(rare, caplog):
    said = (
        "'1' has 4 training images, '0' 58: accuracy will hardly show the rare class. Try --class_weighting balanced"
    )
    for flags in ([], ["--class_weighting", "balanced"], ["--balanced_sampling", "true"]):
        caplog.clear()
        choose(rare, *flags)
        assert (said in caplog.text) == (not flags)


def test_check_does_not_advise_a_flag_that_is_given(rare, tmp_path, capsys, monkeypatch):
    for name in ("_overfit", "_trial"):
        monkeypatch.setattr(sanity_check, name, lambda trainer: [])
    monkeypatch.setattr(sanity_check, "data_report", lambda trainer: None)
    for number, flags in enumerate(([], ["--class_weighting", "balanced"], ["--balanced_sampling", "true"])):
        run(rare, tmp_path / str(number), "--check", "true", *flags)
        assert ("Try --class_weighting balanced" in capsys.readouterr().out) == (not flags)


def test_flags_for_rare_classes_change_the_training(rare, tmp_path):
    short = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]
    for name, flags in {"a": [], "b": ["--class_weighting", "balanced"], "c": ["--balanced_sampling", "true"]}.items():
        run(rare, tmp_path / name, *short, *flags)

    assert weights(tmp_path / "a") != weights(tmp_path / "b") != weights(tmp_path / "c") != weights(tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("several", ["--balanced_sampling", "true"], r"need one class per image, but the labels are any of 2 labels"),
        ("several", ["--target_accuracy", "0.9"], r"--target_accuracy need one class per image, but the labels"),
        ("numbers", ["--class_weighting", "balanced"], r"need one class per image, but the labels are numbers"),
        ("numbers", ["--label_smoothing_factor", "0.1"], r"--label_smoothing_factor is for classes, but the labels"),
        ("numbers", ["--metric_for_best_model", "accuracy"], r"must be one of r2, mae, loss; got 'accuracy'"),
        (
            "several",
            ["--metric_for_best_model", "r2"],
            r"must be one of average_precision, auroc, macro_f1, loss; got",
        ),
    ],
)
def test_what_does_not_suit_the_labels_is_refused(kind, flags, message, request, tmp_path):
    argv, _ = request.getfixturevalue(kind)

    with pytest.raises(UserError, match=message):
        run(argv[0], tmp_path / "run", *argv[2:], *flags)


def test_mirrored_view_of_numbers_has_no_loss_of_its_own(numbers, tmp_path):
    metrics = run(numbers[0][0], tmp_path / "run", "--label_column", "price", "--eval_tta", "flip", "--max_steps", "1",
                  "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false")  # fmt: skip

    assert {"test_loss", "test_r2", "test_flip_r2"} < metrics.keys()
    assert "test_flip_loss" not in metrics


def test_one_label_may_be_missing_among_other_images(several, digits, tmp_path):
    Image.fromarray(np.hstack([np.asarray(digits[3][0])] * 2)).save(tmp_path / "0.png")
    table = write_rows(tmp_path / "table.jsonl", [{"file_name": "0.png", "zero": 1, "one": 0}])

    argv = [str(several[0][1]), "--data", str(table), "--output_dir", str(tmp_path / "out")]
    assert vit_scratch.main(["evaluate", *argv, "--label_column", "zero", "one"]) == 0

    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["support"] for row in report["per_class"].values()] == [1, 0]


def test_small_error_is_better():
    assert ViTTrainingArguments(metric_for_best_model="mae", use_cpu=True).greater_is_better is False
    assert ViTTrainingArguments(metric_for_best_model="r2", use_cpu=True).greater_is_better is True


def test_weights_and_balanced_samples_together_are_refused(rare, tmp_path):
    with pytest.raises(UserError, match=r"--class_weighting does not go together with --balanced_sampling"):
        run(rare, tmp_path / "run", "--class_weighting", "balanced", "--balanced_sampling", "true")
