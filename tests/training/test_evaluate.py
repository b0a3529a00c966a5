"""`vit-scratch evaluate`: a saved run on other labelled images."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from test_train_script import SMALL, train
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import vit_scratch
from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.training.evaluate import load_rows
from hf_vit_scratch.training.recipe import parse_recipe
from hf_vit_scratch.training.trainer import ViTTrainer

SAME = ("test_accuracy", "test_top5_accuracy", "test_loss", "per_class", "confusion_matrix", "calibration", "labels")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on the digits: its folder and report."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    short = ["--max_steps", "40", "--learning_rate", "4e-3", "--eval_strategy", "no", "--save_steps", "40"]
    train.main([*SMALL, *short, "--output_dir", str(folder)])
    return folder, json.loads((folder / "metrics.json").read_text())


@pytest.fixture
def evaluate(run, tmp_path):
    """Evaluates the run into a new folder, and returns the report."""

    def evaluate(*arguments, model=run[0]):
        assert vit_scratch.main(["evaluate", str(model), "--output_dir", str(tmp_path / "out"), *arguments]) == 0
        return json.loads((tmp_path / "out" / "metrics.json").read_text())

    return evaluate


@pytest.fixture
def refused(run, tmp_path, capsys):
    """Returns the one line by which a command is refused."""

    def refused(*arguments, model=run[0]):
        assert vit_scratch.main(["evaluate", str(model), "--output_dir", str(tmp_path / "out"), *arguments]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1].removeprefix("vit-scratch evaluate: error: ")

    return refused


def write_folders(folder, classes, rows=None):
    """Write the test digits of some classes as class folders."""
    for number, row in enumerate(rows or load_digits()["test"]):
        if (name := str(row["label"])) in classes:
            (folder / name).mkdir(parents=True, exist_ok=True)
            row["image"].save(folder / name / f"{number}.png")
    return str(folder)


def test_report_can_be_redirected_into_a_file(evaluate, tmp_path, capsys):
    report = evaluate()
    printed = capsys.readouterr().out
    assert f"Test accuracy           {report['test_accuracy']:.1%}" in printed
    assert printed.splitlines()[-1].startswith(f"Files      {tmp_path / 'out'}: ")


@pytest.mark.parametrize("arguments", [[], ["--data", "digits", "--split", "test"]])
def test_report_of_the_runs_own_test_split_is_that_of_the_run(arguments, run, evaluate, tmp_path):
    report = evaluate(*arguments)

    assert {name: report[name] for name in SAME} == {name: run[1][name] for name in SAME}
    assert report["command"].startswith(f"vit-scratch evaluate {run[0]}")
    assert "epoch" not in report
    for name in ("confusion_matrix", "reliability", "mistakes"):
        Image.open(tmp_path / "out" / f"{name}.png").verify()


def test_checkpoint_is_evaluated_as_its_run(run, evaluate):
    report = evaluate(model=run[0] / "last")
    same = set(SAME) - {"test_loss", "calibration"}  # a checkpoint is not calibrated
    assert {name: report[name] for name in same} == {name: run[1][name] for name in same}


def test_splits_that_were_cut_are_cut_again(class_folders, tmp_path):
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, eval_strategy: no, "
                      "save_strategy: no, load_best_model_at_end: false, test_fraction: 0.3}")  # fmt: skip
    folder, out = tmp_path / "run", tmp_path / "out"
    train.main([str(recipe), *SMALL, "--data", str(class_folders), "--output_dir", str(folder), "--seed", "5"])
    command = ["evaluate", str(folder), "--data", f"{class_folders}/", "--output_dir"]

    assert vit_scratch.main([*command, str(out)]) == 0
    expected = json.loads((folder / "metrics.json").read_text())
    assert json.loads((out / "metrics.json").read_text())["test_loss"] == expected["test_loss"]
    assert (out / "_mistakes.png").exists()  # images of a folder are private
    assert vit_scratch.main([*command, str(tmp_path / "val"), "--split", "val"]) == 0
    matrix = json.loads((tmp_path / "val" / "metrics.json").read_text())["confusion_matrix"]
    assert np.sum(matrix) == 2


def test_own_images_are_known_by_their_place_and_not_by_how_it_is_written(class_folders, tmp_path, monkeypatch):
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, eval_strategy: no, "
                      "save_strategy: no, load_best_model_at_end: false, test_fraction: 0.3}")  # fmt: skip
    monkeypatch.chdir(class_folders.parent)
    train.main([str(recipe), *SMALL, "--data", class_folders.name, "--output_dir", "run"])
    expected = json.loads(Path("run/metrics.json").read_text())["test_loss"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = os.path.relpath(class_folders.parent / "run")

    for number, data in enumerate(([], ["--data", os.path.relpath(class_folders)])):
        assert vit_scratch.main(["evaluate", run, *data, "--output_dir", str(number)]) == 0
        assert json.loads(Path(str(number), "metrics.json").read_text())["test_loss"] == expected


def test_project_that_was_moved_is_evaluated_as_before(class_folders, tmp_path, monkeypatch):
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, eval_strategy: no, "
                      "save_strategy: no, load_best_model_at_end: false, test_fraction: 0.3}")  # fmt: skip
    project, moved = tmp_path / "project", tmp_path / "moved"
    shutil.copytree(class_folders, project / "photos")
    monkeypatch.chdir(project)
    train.main([str(recipe), *SMALL, "--data", "photos", "--output_dir", "run"])
    expected = json.loads(Path("run/metrics.json").read_text())["test_loss"]
    project.rename(moved)
    monkeypatch.chdir(moved)

    for number, data in enumerate(([], ["--data", "photos"])):
        assert vit_scratch.main(["evaluate", "run", *data, "--output_dir", str(number)]) == 0
        assert json.loads(Path(str(number), "metrics.json").read_text())["test_loss"] == expected


def test_folder_called_digits_is_not_the_digits(evaluate, tmp_path, monkeypatch):
    write_folders(tmp_path / "digits", "37", [row for row in load_digits()["test"]][:60])
    monkeypatch.chdir(tmp_path)

    assert np.sum(evaluate("--data", "./digits")["confusion_matrix"]) < 60


@torch.no_grad()
def test_mirrored_views_are_reported_as_in_a_run(run, evaluate):
    report = evaluate("--eval_tta", "flip", "--bf16", "false")

    rows, model = load_digits()["test"], ViTScratchForImageClassification.from_pretrained(run[0])
    images = [image.convert("RGB") for image in rows["image"]]
    pixels = ViTImageProcessor.from_pretrained(run[0])(images, return_tensors="pt")["pixel_values"]
    answers = (model(pixels).logits + model(pixels.flip(-1)).logits).argmax(dim=-1)
    assert report["test_flip_accuracy"] == (answers == torch.tensor(rows["label"])).double().mean().item()
    assert report["test_flip_accuracy"] != report["test_accuracy"] == run[1]["test_accuracy"]


def test_run_whose_images_have_changed_is_refused(class_folders, tmp_path, capsys):
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, eval_strategy: no, "
                      "save_strategy: no, load_best_model_at_end: false}")  # fmt: skip
    folder = tmp_path / "run"
    train.main([str(recipe), *SMALL, "--data", str(class_folders), "--output_dir", str(folder)])
    (class_folders / "temple" / "00.jpg").unlink()

    assert vit_scratch.main(["evaluate", str(folder), "--output_dir", str(tmp_path / "out")]) == 2
    assert "training images could come into the test split" in capsys.readouterr().err


def test_run_without_the_record_of_its_images_cuts_no_splits(class_folders, tmp_path, capsys, caplog):
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, eval_strategy: no, "
                      "save_strategy: no, load_best_model_at_end: false}")  # fmt: skip
    folder = tmp_path / "run"
    train.main([str(recipe), *SMALL, "--data", str(class_folders), "--output_dir", str(folder)])
    (folder / "_run.json").unlink()  # which is never pushed
    command = ["evaluate", str(folder), "--output_dir", str(tmp_path / "out")]

    assert vit_scratch.main(command) == 2
    assert "run has no _run.json, as when it was loaded from the Hub" in capsys.readouterr().err
    assert vit_scratch.main([*command, "--data", str(class_folders)]) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["images"] == 24
    assert "the run was trained on some of these images. Its accuracy on them is too high." in caplog.text


@pytest.mark.parametrize("classes", ["37", "3"])
def test_class_folders_are_evaluated_whole_and_matched_by_name(classes, run, evaluate, tmp_path):
    report = evaluate("--data", write_folders(tmp_path / "some", classes))

    matrix = np.array(run[1]["confusion_matrix"])
    ids = [int(name) for name in classes]
    assert report["labels"] == run[1]["labels"]
    assert np.array_equal(np.array(report["confusion_matrix"])[ids], matrix[ids])
    assert report["test_accuracy"] == pytest.approx(matrix[ids, ids].sum() / matrix[ids].sum())


def test_missing_model_is_named(run, refused):
    missing = run[0].parent / "digit"
    assert refused(model=missing) == (
        f"{missing}: there is no such file or folder. Give a saved model, or the file of an export."
    )


def test_columns_of_the_run_are_not_asked_of_other_data(run, evaluate, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    with (tmp_path / "run" / "recipe.yaml").open("a") as recipe:
        recipe.write("label_column: species\n")
    report = evaluate("--data", write_folders(tmp_path / "some", "37"), model=tmp_path / "run")
    assert sum(map(sum, report["confusion_matrix"])) == np.sum(run[1]["confusion_matrix"], axis=1)[[3, 7]].sum()


def test_classes_in_another_order_are_matched_by_name(run, evaluate, tmp_path):
    digits = load_digits()["test"]
    names = [*"9876543210", "never used"]
    rows = {"picture": digits["image"][:], "digit": [9 - label for label in digits["label"]]}
    features = Features({"picture": ImageFeature(), "digit": ClassLabel(names=names)})
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "reversed.parquet")

    report = evaluate("--data", str(tmp_path / "reversed.parquet"))

    assert report["confusion_matrix"] == run[1]["confusion_matrix"]
    assert report["test_accuracy"] == run[1]["test_accuracy"]


def test_split_of_other_data_is_chosen_by_its_name(run, evaluate, refused, tmp_path):
    for split, classes in (("train", "0123456789"), ("test", "12"), ("valid", "3")):
        write_folders(tmp_path / "more" / split, classes)
    data = ["--data", str(tmp_path / "more")]

    assert refused(*data, "--split", "dev2").startswith(f"{tmp_path}/more: there is no split 'dev2', only ['train', ")
    matrix = np.array(evaluate(*data, "--split", "val")["confusion_matrix"])
    assert set(np.flatnonzero(matrix.sum(axis=1))) == {3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "dev2"], r"there is no split 'dev2', only \['train', 'validation', 'test'\]"),
        (["--per_device_eval_batch_size", "0"], r"^per_device_eval_batch_size must be at least 1, got 0\."),
        (["--image_size", "16"], r"^--image_size changes nothing in a trained model\. Leave it out\."),
        (["--horizontal_flip_prob", "1"], r"^--horizontal_flip_prob changes nothing in a trained model\."),
        (["--learning", "0"], r"^the command line: unknown flag 'learning'"),
        (
            ["--data", "nowhere/at_all"],
            r"nowhere/at_all: there is no such file or folder, and no dataset",
        ),
    ],
)
def test_impossible_argument_is_refused(arguments, message, refused):
    assert re.search(message, refused(*arguments))


def test_choice_of_speed_that_does_not_exist_is_named(run, tmp_path, capsys):
    arguments = ["--output_dir", str(tmp_path / "out"), "--speed_choice", "fast"]
    assert vit_scratch.main(["evaluate", str(run[0]), *arguments]) == 2
    assert "error: 'fast' is not a choice of speed." in capsys.readouterr().err


def test_unknown_class_is_named(refused, tmp_path):
    write_folders(tmp_path / "some", "37")
    (tmp_path / "some" / "7").rename(tmp_path / "some" / "horse")
    assert refused("--data", str(tmp_path / "some")) == (
        f"{tmp_path}/some: the classes must be among those of the model, ['0', '1', '2', '3', '4', '5', '6', '7', "
        "'8', '9'], got ['horse']. Rename or remove them."
    )


def test_classes_of_one_name_cannot_be_matched(run, refused, tmp_path):
    shutil.copytree(run[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["id2label"]["3"] = "4"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    folder = write_folders(tmp_path / "some", "37")
    assert "two classes '4', so they cannot be told apart by name. Rename one in its config.json." in refused(
        "--data", folder, model=tmp_path / "model"
    )


def test_report_is_not_written_where_it_would_be_pushed(run, capsys):
    assert vit_scratch.main(["evaluate", str(run[0]), "--output_dir", str(run[0] / "report")]) == 2
    assert "report is in the folder of the run, whose files are pushed. Choose another." in capsys.readouterr().err


def test_report_overwrites_nothing(run, evaluate, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.json").write_text("{}")
    with pytest.raises(AssertionError, match="assert 2 == 0"):
        evaluate()
    assert (tmp_path / "out" / "metrics.json").read_text() == "{}"
    assert "out is not empty. Choose another --output_dir" in capsys.readouterr().err


def test_model_without_a_run_needs_data(run, refused, tmp_path):
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).symlink_to(run[0] / name)
    assert re.search(
        r"model holds no recipe\.yaml, .* Give --data, and MODEL first\.$", refused(model=tmp_path / "model")
    )


def test_model_that_crops_its_images_is_refused(run, refused, tmp_path):
    shutil.copytree(run[0], tmp_path / "model")
    ViTImageProcessor(size={"height": 8, "width": 8}, do_center_crop=True, crop_size=8).save_pretrained(
        tmp_path / "model"
    )
    assert "only resize and normalize images, but this image processor has do_center_crop True" in refused(
        model=tmp_path / "model"
    )


def test_model_of_another_library_is_refused(refused, tmp_path):
    ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    message = refused("--data", "digits", model=tmp_path / "vit")
    assert message.endswith("got ViTForImageClassification. Convert it with `vit-scratch convert`.")


def test_run_that_was_pushed_is_evaluated_without_the_hub(run, evaluate, tmp_path, monkeypatch):
    pushed = shutil.copytree(run[0], tmp_path / "pushed", symlinks=True)
    with (pushed / "recipe.yaml").open("a") as file:
        file.write("push_to_hub: true\n")
    monkeypatch.setattr(ViTTrainer, "init_hf_repo", lambda *args, **options: pytest.fail("the Hub is called"))

    assert evaluate(model=pushed)["test_accuracy"] == run[1]["test_accuracy"]


def test_other_images_may_lie_in_folders_of_groups_as_those_of_the_run_do(tmp_path, photographs):
    for name in ("cat/v0/0.png", "cat/v1/1.png", "dog/v0/2.png", "dog/v1/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        photographs[0].resize((8, 8)).save(tmp_path / "photos" / name)
    (tmp_path / "recipe.yaml").write_text("group_by: 1")
    args, recipe = parse_recipe([str(tmp_path / "recipe.yaml")])

    _, rows = load_rows(args, recipe, None, str(tmp_path / "photos"), None)

    assert rows["label"][:] == [0, 0, 1, 1]
