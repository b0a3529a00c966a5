"""Exported models: equal to the pipeline for any image, and a proof that finds what is not."""

import io
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from helpers import TINY, randomize_
from peft import LoraConfig, get_peft_model
from PIL import Image
from sklearn.exceptions import UndefinedMetricWarning
from torch import nn
from transformers import EvalPrediction, ViTImageProcessor, pipeline

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.conversion import export as export_module
from hf_vit_scratch.conversion import export_proof
from hf_vit_scratch.conversion.export import FILES, ImageScores, export, labels_and_type
from hf_vit_scratch.conversion.export_proof import evaluate_scores, milliseconds, odd_images, prove, scores_of_export
from hf_vit_scratch.conversion.export_proof import scores_of_pipeline as expected_scores
from hf_vit_scratch.data import exported
from hf_vit_scratch.data.images import decode_image
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.metrics import compute_metrics

NUMBERS = {"problem_type": "regression", "label_mean": [3.0] * 5, "label_scale": [2.0] * 5}
KINDS = {
    "merged LoRA": {"norm_first": False, "pooling": "cls"},
    "several labels": {"problem_type": "multi_label_classification", "norm_first": True, "pooling": "mean"},
    "numbers": NUMBERS | {"position_embedding_type": "rope2d", "qk_norm": True, "norm_first": True},
}


def processor(**options):
    return ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True, **options)


def classifier(processing=None, **fields):
    """A pipeline with random weights, strong enough for scores far from each other."""
    model = randomize_(
        ViTScratchForImageClassification(ViTScratchConfig(**TINY | {"num_hidden_layers": 1} | fields)), 0.3
    ).eval()
    return pipeline("image-classification", model=model, image_processor=processing or processor(), device="cpu")


def odd_scores(answering, classify):
    images = [Image.open(io.BytesIO(file)) for file in odd_images()]
    upright = [Image.fromarray(exported.read_image(io.BytesIO(file))) for file in odd_images()]
    return expected_scores(answering, images), scores_of_export(classify, upright)


@pytest.mark.parametrize("resample", [2, 3], ids=["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 24), (1, 1), (5, 3), (700, 40), (333, 512), (8, 12), (32, 96)], ids=str)
def test_images_are_prepared_to_the_byte_as_by_the_image_processor(size, resample):
    images = torch.randint(256, (2, *size, 3), dtype=torch.uint8)
    images[1, :, : size[1] // 2] = 255  # an edge, beyond which the cubic filter goes
    preparing = processor(resample=resample)

    pixels = ImageScores(Pixels(), preparing)(images)

    expected = preparing(images=[*images.permute(0, 3, 1, 2)], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)


class Pixels(nn.Module):
    """A model whose logits are its input."""

    config = SimpleNamespace(problem_type="regression")

    def set_attn_implementation(self, name):
        pass

    def forward(self, pixel_values):
        return SimpleNamespace(logits=pixel_values)


@pytest.mark.parametrize("resample", [2, 3], ids=["bilinear", "bicubic"])
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_file_prepares_photographs_to_the_byte_as_the_image_processor_does(format, resample, tmp_path):
    preparing = ViTImageProcessor(size={"height": 64, "width": 224}, do_normalize=False, resample=resample)
    classify = exported.load(export(SimpleNamespace(model=Pixels(), image_processor=preparing), tmp_path, format))

    for size in [(272, 182), (259, 273), (1000, 750), (33, 1500)]:
        image = torch.randint(256, (1, *size, 3), dtype=torch.uint8)
        expected = preparing(images=image[0].movedim(-1, 0), return_tensors="np")["pixel_values"]
        np.testing.assert_allclose(classify(image.numpy()), expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_file_of_every_kind_of_model_gives_the_scores_of_the_pipeline(kind, tmp_path):
    answering = classifier(**KINDS[kind])
    if kind == "merged LoRA":
        adapted = get_peft_model(answering.model, LoraConfig(target_modules=["q_proj", "v_proj"]))
        answering.model = randomize_(adapted, 0.3).merge_and_unload().eval()

    classify = exported.load(export(answering, tmp_path, "onnx"))

    theirs, ours = odd_scores(answering, classify)
    assert np.abs(ours - theirs).max() < 1e-5 * max(1, np.abs(theirs).max())
    assert np.ptp(theirs, axis=0).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("format", ["openvino", "pt2"])
def test_other_formats_give_the_scores_of_the_pipeline(format, tmp_path):
    answering = classifier(processor(resample=3))
    path = export(answering, tmp_path, format)
    theirs, ours = odd_scores(answering, exported.load(path))
    assert path.name == FILES[format]
    # OpenVINO's sums over 2,000 pixels may round one pixel to its neighbor.
    assert np.sort(np.abs(ours - theirs).max(axis=1))[-2] < 1e-5
    assert np.abs(ours - theirs).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_8_bit_integers_are_smaller_and_near(format, tmp_path):
    answering = classifier(hidden_size=64, intermediate_size=256)
    calibration = [np.random.default_rng(n).integers(0, 256, (1, 30, 40, 3), dtype=np.uint8) for n in range(8)]
    export(answering, tmp_path, format)
    (tmp_path / "int8").mkdir()
    path = export(answering, tmp_path / "int8", format, calibration)

    theirs, ours = odd_scores(answering, exported.load(path))

    full, small = (sum(file.stat().st_size for file in folder.glob("model.*")) for folder in (tmp_path, path.parent))
    assert small < 0.75 * full
    assert 1e-4 < np.abs(ours - theirs).max() < 0.3
    if format == "onnx":  # all products with weights are of 8-bit integers
        weights = [weight for weight in onnx.load(path).graph.initializer if weight.dims]
        assert sum(weight.data_type == onnx.TensorProto.INT8 for weight in weights) >= 14


@pytest.fixture
def labelled():
    """A pipeline, and images that it answers in all ways, with these answers as their labels."""
    answering = classifier()
    rng = np.random.default_rng(1)
    images = [Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)) for _ in range(40)]
    return answering, images, expected_scores(answering, images).argmax(1)


def run_module(module):
    """Let a module of images stand in for an exported file."""

    def classify(images):
        with torch.no_grad():
            return module(torch.from_numpy(images)).numpy()

    return classify


def test_proof_of_an_equal_export_has_no_fault(labelled):
    answering, images, labels = labelled
    proof = prove(
        answering, run_module(ImageScores(answering.model, answering.image_processor)), images, labels, False
    )
    assert proof["faults"] == []
    assert proof["test"] == {"images": 40, "largest_difference": pytest.approx(0, abs=1e-5), "answers_changed": 0}
    assert proof["export"] == pytest.approx(proof["pipeline"], rel=1e-5)
    assert proof["export"]["accuracy"] == 1


@pytest.mark.parametrize(("kind", "metric"), [("several labels", "average_precision"), ("numbers", "r2")])
def test_proof_takes_every_kind_of_target(kind, metric):
    answering = classifier(**KINDS[kind])
    rng = np.random.default_rng(1)
    images = [Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)) for _ in range(40)]
    scores = expected_scores(answering, images)
    labels = scores.astype(np.float64) if kind == "numbers" else (scores > np.median(scores, axis=0)).astype(np.int64)
    right = run_module(ImageScores(answering.model, answering.image_processor))

    proof = prove(answering, right, images, labels, False)
    assert (proof["metric"], proof["faults"]) == (metric, [])
    assert proof["export"][metric] == pytest.approx(1, abs=1e-3)
    wrong = prove(answering, lambda batch: 1 - right(batch), images, labels, False)
    assert "scores of test images differ" in wrong["faults"][0]
    assert wrong["test"]["answers_changed"] == (0 if kind == "numbers" else 40)


def swap_channels(module):
    return lambda images: run_module(module)(images[..., ::-1].copy())


def leave_normalization_out(module):
    module.mean.zero_()
    module.std.fill_(255)
    return run_module(module)


def interpolate_otherwise(module):
    module.bicubic = True
    return run_module(module)


def resize_without_antialiasing(module):
    def classify(images):
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        pixels = nn.functional.interpolate(pixels, module.size, mode="bilinear").round()
        return run_module(module)(pixels.permute(0, 2, 3, 1).byte().numpy())

    return classify


@pytest.mark.parametrize(
    "wrong", [swap_channels, leave_normalization_out, interpolate_otherwise, resize_without_antialiasing]
)
def test_proof_finds_wrong_preprocessing(wrong, labelled):
    answering, images, labels = labelled
    classify = wrong(ImageScores(answering.model, answering.image_processor))
    assert "odd images" in " ".join(prove(answering, classify, images, labels, False)["faults"])


@pytest.mark.parametrize(("wrong_images", "is_refused"), [(3, False), (4, True)])
def test_8_bit_integers_may_lose_half_a_point_or_three_images(wrong_images, is_refused, labelled):
    answering, images, labels = labelled
    right, calls = run_module(ImageScores(answering.model, answering.image_processor)), []

    def classify(batch):
        scores = right(batch)
        if batch.shape == (32, 16, 24, 3):
            scores[:wrong_images] = np.roll(scores[:wrong_images], 1, axis=1)
            calls.append(batch)
        return scores

    faults = prove(answering, classify, images, labels, True)["faults"]
    assert len(calls) == 1
    assert bool(faults) == is_refused
    assert not faults or faults[0].startswith("accuracy falls from 1.0000 to 0.9000, by more than 0.0750")


def test_metric_that_a_single_image_does_not_have_is_no_fault_of_8_bit_integers():
    answering = classifier(**KINDS["numbers"])
    classify = run_module(ImageScores(answering.model, answering.image_processor))
    image = Image.new("RGB", (24, 16), "teal")

    with pytest.warns(UndefinedMetricWarning, match="not well-defined with less than two samples"):
        proof = prove(answering, classify, [image], expected_scores(answering, [image]).astype(np.float64), True)

    assert np.isnan(proof["pipeline"]["r2"])
    assert proof["faults"] == []


def test_answers_that_change_are_a_fault_even_if_the_scores_hardly_do(labelled, monkeypatch):
    answering, images, labels = labelled
    even = np.full((len(images), 5), 0.2)
    nearly = even + 1e-4 * np.eye(5)[1]
    monkeypatch.setattr(export_proof, "scores_of_pipeline", lambda classifier, images: even[: len(images)])
    monkeypatch.setattr(export_proof, "scores_of_export", lambda classify, images: nearly[: len([*images])])

    faults = prove(answering, None, images, labels, False)["faults"]

    assert faults[0] == "40 of 40 answers to test images change"


def test_classes_of_one_name_have_their_own_scores():
    answering = classifier()
    image = Image.new("RGB", (24, 16), "red")
    expected = expected_scores(answering, [image])
    answering.model.config.id2label = dict.fromkeys(range(5), "crane")

    np.testing.assert_array_equal(expected_scores(answering, [image]), expected)
    assert answering.model.config.id2label == dict.fromkeys(range(5), "crane")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_refused(wrong, labelled):
    answering, images, labels = labelled
    with pytest.raises(UserError, match="does not answer as the model does: its scores are not"):
        prove(answering, lambda batch: np.full((len(batch), 5), wrong), images, labels, False)


@pytest.mark.parametrize("targets", [np.array([0, 3, 1]), np.eye(3, 5, dtype=np.int64), np.random.randn(3, 5)])
def test_metrics_of_scores_are_those_of_the_logits(targets):
    logits = torch.randn(3, 5, dtype=torch.float64)
    scores = {1: logits.softmax(-1), 2: logits.sigmoid() if targets.dtype == np.int64 else logits}[targets.ndim]
    expected = compute_metrics(EvalPrediction(logits.numpy(), targets))
    assert evaluate_scores(scores.numpy(), targets)[1] == pytest.approx(expected, rel=1e-5)


def test_scores_of_zero_have_a_finite_loss():
    _, metrics = evaluate_scores(np.array([[1.0, 0.0, 0.0]]), np.array([1]))
    assert 20 < metrics["loss"] < 40


def test_time_is_measured_for_the_model_as_it_is_and_optimized(monkeypatch):
    monkeypatch.setattr(export_proof, "SECONDS", 0.0)  # once each
    answering = classifier()
    times = milliseconds(answering, lambda images: images, np.zeros((2, 16, 24, 3), np.uint8))
    assert list(times) == ["PyTorch", "optimized PyTorch", "export"]
    assert times["export"] < min(times["PyTorch"], times["optimized PyTorch"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_center_crop": True, "crop_size": 16}, "do_center_crop True"),
        ({"resample": 0}, "resample 0"),
        ({"do_resize": False}, "size {.*}"),
    ],
)
def test_other_preprocessing_is_refused(options, message, tmp_path):
    with pytest.raises(UserError, match=f"only resize and normalize images, but this image processor has {message}"):
        export(classifier(processor(**options)), tmp_path, "pt2")


def test_exported_script_shows_a_transparent_color_as_white(tmp_path):
    colors = Image.fromarray(np.array([[[10, 200, 30], [0, 0, 255]]], np.uint8))
    colors.save(tmp_path / "image.png", transparency=(0, 0, 255))
    np.testing.assert_array_equal(exported.read_image(tmp_path / "image.png"), [[[10, 200, 30], [255, 255, 255]]])


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(export_module.PACKAGES, "onnx", ("numpy", "no_such_package"))
    with pytest.raises(UserError, match=r"--format onnx needs more packages: python -m pip install no_such_package$"):
        export_module.refuse_missing_packages("onnx")


@pytest.mark.parametrize(("mode", "highest", "reads"), [("I;16", 200, True), ("I;16", 300, False), ("F", 1, False)])
def test_exported_script_reads_the_grey_values_that_training_reads(mode, highest, reads, tmp_path):
    values = np.linspace(0, highest, 64).reshape(8, 8)
    Image.fromarray(values.astype({"I;16": np.uint16, "F": np.float32}[mode])).save(tmp_path / "grey.tiff")
    row = {"path": str(tmp_path / "grey.tiff"), "bytes": None}
    if reads:
        expected = np.array(decode_image(row, "grey"))
        np.testing.assert_array_equal(exported.read_image(tmp_path / "grey.tiff"), expected)
        return
    with pytest.raises(ValueError, match=rf"its grey values go from 0 to {highest:g}, not from 0 to 255"):
        exported.read_image(tmp_path / "grey.tiff")
    with pytest.raises(UserError, match=r"its grey values go from 0 to"):
        decode_image(row, "grey")


def test_exported_script_starts_no_ghostscript(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.eps")
    with pytest.raises(ValueError, match="EPS files are not supported"):
        exported.read_image(tmp_path / "photo.eps")


def test_exported_script_says_how_it_is_used(tmp_path):
    shutil.copy(exported.__file__, tmp_path / "predict.py")
    (tmp_path / "export.json").write_text('{"model": "model.onnx"}')
    for arguments, code in (["--help"], 0), ([], 1):
        command = [sys.executable, str(tmp_path / "predict.py"), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == code
        assert "python predict.py IMAGE [IMAGE ...]" in ended.stdout


@pytest.mark.parametrize("fields", [{"num_labels": 7}, NUMBERS], ids=["classes", "numbers"])
def test_exported_folder_needs_its_runtime_and_pillow_only(fields, tmp_path):
    answering = classifier(**fields)
    path = export(answering, tmp_path, "onnx")
    labels, kind = labels_and_type(answering.model.config)
    facts = {"model": path.name, "labels": labels, "problem_type": kind}
    (tmp_path / "export.json").write_text(json.dumps(facts))
    image = tmp_path / "odd.png"
    image.write_bytes([*odd_images()][1])
    script = (
        "import runpy, sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'torchvision', 'transformers', 'hf_vit_scratch', 'scipy'))\n"
        f"sys.argv = ['predict.py', {str(image)!r}]\n"
        f"runpy.run_path({str(tmp_path / 'predict.py')!r}, run_name='__main__')"
    )
    shutil.copy(exported.__file__, tmp_path / "predict.py")

    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    answer = json.loads(printed)
    assert answer["image"] == str(image)
    expected = answering(str(image))
    if kind == "regression":  # the numbers in their order, where the pipeline sorts them
        expected.sort(key=lambda row: labels.index(row["label"]))
    assert [row["label"] for row in answer["predictions"]] == [row["label"] for row in expected]
    for ours, theirs in zip(answer["predictions"], expected, strict=True):
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)
