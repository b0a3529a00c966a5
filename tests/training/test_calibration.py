"""After training, a classifier's scores are calibrated, and it knows what it should not answer."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from test_train_script import SMALL, train
from transformers import AutoModelForImageClassification, pipeline

import vit_scratch
from hf_vit_scratch import ViTScratchConfig
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.evaluation.trust import FILE, Trust, fit_temperature
from hf_vit_scratch.training import calibration, steps

SHORT = ["--max_steps", "60", "--learning_rate", "4e-3", "--eval_strategy", "no", "--save_steps", "60"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on the digits that wants an accuracy: its folder."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train.main([*SMALL, *SHORT, "--target_accuracy", "0.9", "--output_dir", str(folder)])
    return folder


def logits_of(folder, images):
    classify = pipeline("image-classification", model=str(folder))
    with torch.no_grad():
        inputs = classify.image_processor([image.convert("RGB") for image in images], return_tensors="pt")
        return classify.model(**inputs).logits.double().numpy()


def test_the_last_layer_alone_is_divided_by_the_temperature(run):
    trained, calibrated = (load_file(folder / "model.safetensors") for folder in (run / "last", run))
    temperature = ViTScratchConfig.from_pretrained(run).temperature

    for name, weight in trained.items():
        factor = temperature if name.startswith("classifier.") else 1.0
        torch.testing.assert_close(calibrated[name] * factor, weight, rtol=1e-6, atol=0)
    assert ViTScratchConfig.from_pretrained(run / "last").temperature is None


def test_the_temperature_is_that_of_the_validation_split(run):
    rows = load_splits("digits", seed=42, near_duplicates="ignore")["validation"]
    logits = logits_of(run / "last", rows["image"])

    temperature = fit_temperature(logits, np.array(rows["label"]))

    assert Trust.load(str(run)).temperature == pytest.approx(temperature, rel=1e-3)
    assert Trust.load(str(run)).temperature == ViTScratchConfig.from_pretrained(run).temperature


def test_no_answer_changes(run):
    images = load_splits("digits")["test"]["image"]
    assert np.array_equal(logits_of(run, images).argmax(1), logits_of(run / "last", images).argmax(1))


def test_report_says_what_was_found(run):
    report, trust = json.loads((run / "metrics.json").read_text()), Trust.load(str(run))
    card = (run / "README.md").read_text()

    assert report["trust"] == trust.facts()
    assert trust.accuracy >= 0.9 == trust.target_accuracy
    assert f"{trust.calibration_error:.3f}, before calibration {trust.error_before:.3f}" in card
    assert f"{trust.coverage:.1%} of the validation images" in card


def test_predict_answers_or_says_unknown(run, tmp_path, capsys):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    for number, image in enumerate(load_splits("digits")["test"]["image"][:60]):
        image.save(tmp_path / f"{number:02}.png")

    assert vit_scratch.main(["predict", str(run), str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 0

    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    trust, answers = Trust.load(str(run)), [row["answer"] for row in rows]
    assert answers[-1] == "unknown"  # noise.png
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'out.csv'}: 61 images, ")
    assert f", {answers.count('unknown')} unknown" in last
    assert all(row["answer"] in (row["label_1"], "unknown") for row in rows)
    assert all(row["answer"] == "unknown" for row in rows if float(row["score_1"]) < trust.least_score)
    assert trust.coverage - 0.2 < np.mean([answer != "unknown" for answer in answers[:-1]]) < trust.coverage + 0.2


def test_adapted_model_is_not_judged_by_the_vectors_of_its_base(run, tmp_path, capsys):
    adapted = shutil.copytree(run, tmp_path / "run")
    base = AutoModelForImageClassification.from_pretrained(adapted)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapted)
    Image.new("L", (8, 8)).save(tmp_path / "one.png")

    assert vit_scratch.main(["predict", str(adapted), str(tmp_path / "one.png")]) == 0

    assert "answer" not in json.loads(capsys.readouterr().out)


def test_model_in_the_home_folder_is_found(run, tmp_path, monkeypatch, capsys):
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    monkeypatch.setenv("HOME", str(run.parent))

    assert vit_scratch.main(["predict", f"~/{run.name}", str(tmp_path / "one.png")]) == 0
    assert "answer" in json.loads(capsys.readouterr().out)


def test_model_is_saved_before_anything_can_fail(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(Trust, "fit", fail)
    with pytest.raises(RuntimeError, match="planted"):
        train.main([*SMALL, "--max_steps", "2", "--eval_strategy", "no", "--output_dir", str(tmp_path / "c")])

    assert logits_of(tmp_path / "c", [Image.new("L", (8, 8))]).shape == (1, 10)


def test_every_class_has_its_mean_however_few_images_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "MOST_IMAGES", 10)
    classes, fit = [], Trust.fit
    monkeypatch.setattr(
        Trust, "fit", lambda vectors, labels, *args: classes.extend(labels) or fit(vectors, labels, *args)
    )

    train.main([*SMALL, "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no",
                "--load_best_model_at_end", "false", "--output_dir", str(tmp_path)])  # fmt: skip

    assert sorted(classes) == list(range(10))


def test_temperature_is_that_of_all_calibrations(tmp_path, monkeypatch):
    weights = []

    def calibrate_twice(trainer):
        for _ in range(2):
            weights.append(trainer.model.classifier.weight.detach().clone())
            calibration.calibrate(trainer)
        weights.append(trainer.model.classifier.weight.detach() * trainer.model.config.temperature)

    monkeypatch.setattr(steps, "calibrate", calibrate_twice)
    train.main([*SMALL, "--max_steps", "20", "--eval_strategy", "no", "--save_strategy", "no",
                "--load_best_model_at_end", "false", "--output_dir", str(tmp_path)])  # fmt: skip

    assert not torch.allclose(weights[1], weights[0])
    torch.testing.assert_close(weights[2], weights[0])


def test_class_called_unknown_is_warned_of(class_folders, tmp_path, caplog):
    (class_folders / "temple").rename(class_folders / "unknown")
    train.main(["digits", *SMALL, "--data", str(class_folders), "--output_dir", str(tmp_path / "run"), "--max_steps",
                "1", "--eval_strategy", "no", "--near_duplicates", "ignore"])  # fmt: skip
    assert any(line.startswith("A class is called 'unknown', which is also the answer") for line in caplog.messages)


def test_it_can_be_turned_off(tmp_path):
    train.main(
        [
            *SMALL,
            "--max_steps",
            "2",
            "--eval_strategy",
            "no",
            "--calibrate",
            "false",
            "--output_dir",
            str(tmp_path / "a"),
        ]
    )

    assert not (tmp_path / "a" / FILE).exists()
    assert ViTScratchConfig.from_pretrained(tmp_path / "a").temperature is None
    assert "trust" not in json.loads((tmp_path / "a" / "metrics.json").read_text())


def test_model_that_starts_from_a_calibrated_one_is_not_called_calibrated(run, tmp_path):
    flags = ["--max_steps", "2", "--eval_strategy", "no", "--calibrate", "false", "--output_dir", str(tmp_path / "b")]
    train.main([*SMALL, *flags, "--model", str(run)])

    assert ViTScratchConfig.from_pretrained(tmp_path / "b").temperature is None


def test_model_without_its_file_predicts_without_answers(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns(FILE, "checkpoint-*", "last", "best"))
    load_splits("digits")["test"]["image"][0].save(tmp_path / "one.png")
    arguments = ["predict", str(tmp_path / "copy"), str(tmp_path / "one.png"), "--output", str(tmp_path / "out.jsonl")]

    assert vit_scratch.main(arguments) == 0
    assert "answer" not in json.loads((tmp_path / "out.jsonl").read_text())
