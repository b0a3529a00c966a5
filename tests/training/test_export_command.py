"""`vit-scratch export`: the files, the proof, and the report of an exported model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_train_script import SMALL, train

import vit_scratch
from hf_vit_scratch.conversion import export_proof
from hf_vit_scratch.data import exported
from hf_vit_scratch.training import export, steps
from hf_vit_scratch.training.evaluate import load_rows
from hf_vit_scratch.training.steps import load_data

FILES = ["export.json", "model.onnx", "predict.py", "requirements.txt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on the digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    short = ["--max_steps", "40", "--learning_rate", "4e-3", "--eval_strategy", "no", "--save_steps", "40"]
    train.main([*SMALL, *short, "--output_dir", str(folder)])
    return folder


@pytest.fixture(scope="module", autouse=True)
def _measure_briefly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_proof, "SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def onnx(run):
    """The folder of its export."""
    assert vit_scratch.main(["export", str(run), "--format", "onnx"]) == 0
    return run / "onnx"


def test_export_writes_the_model_with_all_that_it_needs(onnx):
    assert sorted(path.name for path in onnx.iterdir()) == FILES
    runtime, *others = (onnx / "requirements.txt").read_text().splitlines()
    assert runtime.startswith("onnxruntime==")
    assert others == ["pillow"]
    assert (onnx / "predict.py").read_text() == Path(exported.__file__).read_text()


def test_proof_compares_all_test_images(run, onnx):
    facts = json.loads((onnx / "export.json").read_text())
    report = json.loads((run / "metrics.json").read_text())
    assert facts["test"]["images"] == report["images"]
    assert facts["faults"] == []
    assert facts["pipeline"]["accuracy"] == facts["export"]["accuracy"] == report["test_accuracy"]
    assert facts["labels"] == report["labels"]
    assert {*facts["milliseconds"]} == {"1 image", "32 images"}


def test_exported_model_has_the_report_of_its_run(run, onnx, tmp_path):
    assert vit_scratch.main(["evaluate", str(onnx / "model.onnx"), "--output_dir", str(tmp_path / "out")]) == 0
    ours, theirs = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path / "out", run))
    for name in ("confusion_matrix", "per_class", "labels", "test_accuracy", "test_accuracy_low", "problem_type"):
        assert ours[name] == theirs[name]
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-3)
    error = [report["calibration"]["expected_calibration_error"] for report in (ours, theirs)]
    assert error[0] == pytest.approx(error[1], abs=1e-3)
    assert (tmp_path / "out" / "mistakes.png").is_file()


def test_program_beside_the_export_names_what_it_cannot_read(onnx, tmp_path):
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(tmp_path / "wide.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    files = [str(tmp_path / name) for name in ("wide.png", "broken.jpg", "good.png")]

    done = subprocess.run([sys.executable, onnx / "predict.py", *files], capture_output=True, text=True)

    assert done.returncode == 1, done.stderr
    wide, broken, good = map(json.loads, done.stdout.splitlines())
    assert wide == {
        "image": files[0],
        "error": "its grey values go from 3000 to 3000, not from 0 to 255: save it with 8 bits",
    }
    assert "cannot identify image file" in broken["error"]
    assert len(good["predictions"]) == 5


def test_numbers_have_neither_interval_nor_answers_in_the_summary():
    found = {"answers_changed": 0, "images": 4, "largest_difference": 2e-7}
    facts = {
        "metric": "r2",
        "problem_type": "regression",
        "megabytes": 1.5,
        "pipeline": {"r2": 0.9},
        "export": {"r2": 0.9},
        "test": found,
    }
    lines = export.summary(facts | {"odd": found, "milliseconds": {"1 image": {"PyTorch": 2.0, "export": 0.5}}})
    assert lines.splitlines() == [
        "Size         1.50 MB",
        "Pipeline     test R2 0.900",
        "Export       test R2 0.900",
        "Test images  scores differ by up to 2.0e-07",
        "Odd images   scores differ by up to 2.0e-07",
        "Time         1 image, to scores: PyTorch 2.00 ms; export 0.50 ms",
    ]


def test_summary_gives_accuracy_as_the_report_does():
    found = {"answers_changed": 0, "images": 100, "largest_difference": 2e-7}
    scores = {"pipeline": {"accuracy": 0.5, "top5_accuracy": 0.9}, "export": {"accuracy": 0.4, "top5_accuracy": 0.9}}
    facts = {"metric": "accuracy", "problem_type": "single_label_classification", "megabytes": 1.5, "milliseconds": {}}
    facts |= scores | dict.fromkeys(("test", "odd"), found)

    lines = export.summary(facts)

    assert lines.splitlines()[1:4] == [
        "Pipeline     test accuracy 50.0%, 95% interval 40.4 to 59.6",
        "Export       test accuracy 40.0%, 95% interval 30.9 to 49.8",
        "Test images  0 of 100 answers change; scores differ by up to 2.0e-07",
    ]


@pytest.mark.slow
def test_int8_is_calibrated_on_other_images_than_it_is_proven_on(run, monkeypatch):
    asked, loads = [], []
    monkeypatch.setattr(export, "load_rows", lambda *arguments: asked.append(arguments[4]) or load_rows(*arguments))
    monkeypatch.setattr(steps, "load_data", lambda args: loads.append(args) or load_data(args))
    assert vit_scratch.main(["export", str(run), "--format", "onnx", "--int8"]) == 0
    facts = json.loads((run / "onnx-int8" / "export.json").read_text())
    assert (asked, len(loads)) == ([None, "validation"], 1)
    assert facts["test"]["largest_difference"] > 1e-5


@pytest.mark.slow
def test_int8_of_a_run_without_its_images_is_calibrated_on_the_data_that_is_given(class_folders, tmp_path, caplog):
    short = ["--image_size", "16", "--max_steps", "1", "--eval_strategy", "no", "--output_dir", str(tmp_path / "run")]
    train.main(["digits", *SMALL, "--data", str(class_folders), *short])
    new = class_folders.rename(tmp_path / "new")
    command = ["export", str(tmp_path / "run"), "--format", "onnx", "--int8"]

    assert vit_scratch.main(command) == 2
    assert vit_scratch.main([*command, "--data", str(new)]) == 0

    assert f"The 8-bit integers are chosen by {new} instead." in caplog.text


def test_export_that_answers_otherwise_fails_and_says_why(run, tmp_path, monkeypatch, capsys):
    load = exported.load

    def swapping(path):
        classify = load(path)
        return lambda images: classify(images[..., ::-1].copy())

    monkeypatch.setattr(exported, "load", swapping)
    assert vit_scratch.main(["export", str(run), "--format", "pt2", "--output_dir", str(tmp_path / "out")]) == 2
    assert "The export does not answer as the model does: scores of odd images differ" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "export.json").read_text())["faults"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "pt2", "--int8"], "--int8 is for --format onnx and openvino."),
        (["--format", "pt2", "--split", "dev2"], "there is no split 'dev2'"),
        (["--format", "pt2", "--learning", "0"], "unknown flag 'learning'"),
    ],
)
def test_impossible_argument_is_refused(arguments, message, run, tmp_path, capsys):
    assert vit_scratch.main(["export", str(run), *arguments, "--output_dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_of_a_model_of_the_hub_needs_a_folder(capsys):
    assert vit_scratch.main(["export", "somebody/digits", "--format", "onnx", "--data", "digits"]) == 2
    assert (
        "somebody/digits is not a local folder, so the export has no default folder. Give --output_dir."
        in capsys.readouterr().err
    )


def test_requirements_can_be_installed_from_the_package_index(monkeypatch):
    monkeypatch.setattr(export, "version", lambda name: "2.14.1+cpu")
    monkeypatch.setattr(export, "packages_distributions", lambda: {"torch": ["torch-for-me"]})
    assert export._requirements("pt2") == ["torch-for-me==2.14.1", "pillow", "numpy"]


def test_export_overwrites_nothing(onnx, run, capsys):
    assert vit_scratch.main(["export", str(run), "--format", "onnx"]) == 2
    assert "onnx is not empty. Choose another --output_dir" in capsys.readouterr().err


def test_file_that_is_no_export_is_refused(tmp_path, capsys):
    (tmp_path / "model.onnx").write_bytes(b"")
    command = ["evaluate", str(tmp_path / "model.onnx"), "--data", "digits", "--output_dir", str(tmp_path / "out")]
    assert vit_scratch.main(command) == 2
    assert "model.onnx cannot be loaded: " in capsys.readouterr().err
