"""The command line that makes saved models of other libraries ours, and the table of measured differences."""

import argparse
import json
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import timm
import torch
from helpers import TINY, randomize_
from safetensors.torch import save_file
from timm.models import VisionTransformer as TimmVisionTransformer
from timm.models import save_for_hf
from torch.optim.swa_utils import AveragedModel
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer
from torchvision.models import resnet18
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
    pipeline,
)

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.conversion import parity
from hf_vit_scratch.conversion.convert import main
from hf_vit_scratch.conversion.parity import PEERS, largest_differences

EXACTNESS = Path(__file__).parents[2] / "docs" / "exactness.md"


def tiny_vit(**fields):
    return randomize_(ViTForImageClassification(ViTConfig(**TINY | {"image_size": 16, "patch_size": 4} | fields)), 0.5)


def tiny_timm(**options):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    return randomize_(TimmVisionTransformer(**sizes | {"num_classes": 5} | options), 0.5).eval()


def tiny_torchvision(**options):
    return randomize_(TorchvisionVisionTransformer(16, 4, 2, 4, 32, 48, num_classes=5, **options), 0.5).eval()


def convert(source, destination, *options):
    return vit_scratch.main(["convert", str(source), str(destination), *options])


def error_of(capsys, *arguments):
    """The one line that a refused conversion prints."""
    assert convert(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("vit-scratch convert: error: ")


# Folders


@torch.no_grad()
def test_transformers_folder(tmp_path, capsys, photographs):
    theirs = tiny_vit(id2label=dict(enumerate("abcde"))).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1] * 3)
    processor.save_pretrained(tmp_path / "theirs")

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    printed = capsys.readouterr().out
    assert "Converted ViTForImageClassification" in printed
    assert "2 layers, hidden size 32, 4 attention heads; images 16x16, patches 4x4, 5 labels" in printed
    assert "with random weights its outputs and hidden states equal the source's, in float64" in printed
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    pixel_values = torch.randn(2, 3, 16, 16)
    assert torch.equal(ours(pixel_values).logits, theirs(pixel_values).logits)
    assert AutoImageProcessor.from_pretrained(tmp_path / "ours").image_mean == (0.1, 0.1, 0.1)
    assert pipeline("image-classification", model=str(tmp_path / "ours"))(photographs[0])[0]["label"] in "abcde"


def test_transformers_encoder_without_image_processor(tmp_path, capsys):
    ViTModel(tiny_vit().config, add_pooling_layer=False).save_pretrained(tmp_path / "theirs")

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    assert "no image processor is known or fits: save one there" in capsys.readouterr().out
    assert type(AutoModel.from_pretrained(tmp_path / "ours")) is ViTScratchModel


@torch.no_grad()
def test_timm_folder(tmp_path, capsys):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=2).eval()
    save_for_hf(theirs, tmp_path / "theirs", safe_serialization=True, model_args={"img_size": 32, "depth": 2})

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    assert "its outputs and hidden states equal the source's" in capsys.readouterr().out
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    pixel_values = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(pixel_values).logits, theirs(pixel_values))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "ours")
    assert (processor.size["height"], processor.image_mean) == (32, (0.5, 0.5, 0.5))


@pytest.mark.parametrize("options", [{}, {"global_pool": ""}, {"global_pool": "avg"}], ids=str)
def test_timm_folder_without_a_head(options, tmp_path, capsys):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, depth=2, **options)
    save_for_hf(
        theirs, tmp_path / "theirs", safe_serialization=True, model_args={"img_size": 32, "depth": 2, **options}
    )

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    assert "its outputs and hidden states equal the source's" in capsys.readouterr().out
    assert type(AutoModel.from_pretrained(tmp_path / "ours")) is ViTScratchModel


def test_timm_folder_brings_its_labels_and_interpolation(tmp_path, capsys):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=48, num_classes=2, depth=1)
    theirs.pretrained_cfg |= {"interpolation": "bicubic", "crop_pct": 0.9, "input_size": (3, 48, 48)}
    save_for_hf(theirs, tmp_path / "theirs", safe_serialization=True, model_args={"img_size": 48, "depth": 1},
                model_config={"label_names": ["cat", "dog"]})  # fmt: skip

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    processor = AutoImageProcessor.from_pretrained(tmp_path / "ours")
    assert (processor.resample, processor.size["height"]) == (3, 48)
    assert "preprocessor_config.json prepares images" in capsys.readouterr().out
    assert ViTScratchConfig.from_pretrained(tmp_path / "ours").id2label == {0: "cat", 1: "dog"}


def test_grey_timm_folder_gets_no_image_processor_of_rgb(tmp_path, capsys):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2, depth=1, in_chans=1)
    theirs.pretrained_cfg |= {"input_size": (1, 32, 32)}
    save_for_hf(theirs, tmp_path / "theirs", safe_serialization=True,
                model_args={"img_size": 32, "depth": 1, "in_chans": 1})  # fmt: skip

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    assert "no image processor is known or fits: save one there" in capsys.readouterr().out
    assert not (tmp_path / "ours" / "preprocessor_config.json").exists()


def test_code_beside_an_image_processor_is_not_executed(tmp_path, monkeypatch):
    tiny_vit().save_pretrained(tmp_path / "theirs")
    processor = {"image_processor_type": "Theirs", "auto_map": {"AutoImageProcessor": "theirs.Theirs"}}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "theirs" / "theirs.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    monkeypatch.setattr("builtins.input", lambda question: "y")  # whether to run it

    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0

    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "ours" / "preprocessor_config.json").exists()


# Files of weights


def test_torchvision_file_with_the_names_of_old(tmp_path):
    state = tiny_torchvision().state_dict()
    old = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): x for name, x in state.items()}
    for name, tensors in (("old", old), ("new", state)):
        torch.save(tensors, tmp_path / f"{name}.pth")
        assert convert(tmp_path / f"{name}.pth", tmp_path / name, "--num_attention_heads", "4") == 0

    assert (tmp_path / "old/model.safetensors").read_bytes() == (tmp_path / "new/model.safetensors").read_bytes()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "model.", "model._orig_mod.", "module."])
def test_wrapped_names_of_a_file_are_unwrapped(prefix, tmp_path):
    state = {prefix + name: tensor for name, tensor in tiny_timm().state_dict().items()}
    save_file(state, tmp_path / "theirs.safetensors")

    assert convert(tmp_path / "theirs.safetensors", tmp_path / "ours", "--num_attention_heads", "4") == 0


def test_average_of_a_training_script_is_taken(tmp_path):
    state = {"model": {}, "model_ema": AveragedModel(tiny_torchvision()).state_dict()}
    torch.save(state, tmp_path / "theirs.pth")

    assert convert(tmp_path / "theirs.pth", tmp_path / "ours", "--num_attention_heads", "4") == 0


@pytest.mark.parametrize("prefix", ["_orig_mod.", "model."])
def test_file_of_a_training_script_with_its_flags(prefix, tmp_path):
    state = {prefix + name: tensor for name, tensor in tiny_timm().state_dict().items()}
    torch.save({"epoch": 1, "args": argparse.Namespace(lr=0.1), "state_dict": state}, tmp_path / "theirs.pth")

    assert convert(tmp_path / "theirs.pth", tmp_path / "ours", "--num_attention_heads", "4", "--pooling", "mean") == 0

    config = ViTScratchConfig.from_pretrained(tmp_path / "ours")
    assert (config.pooling, config.use_cls_token) == ("mean", True)


@pytest.mark.parametrize(
    "options",
    [{}, {"global_pool": "avg"}, {"global_pool": "avg", "class_token": False, "fc_norm": False}, {"qkv_bias": False}],
    ids=str,
)
@pytest.mark.parametrize("wrapping", ["plain", "model", "ddp"])
@torch.no_grad()
def test_timm_file(options, wrapping, tmp_path, capsys):
    theirs = tiny_timm(**options)
    state = theirs.state_dict()
    if wrapping == "model":
        state = {"epoch": 3, "model": state}
    elif wrapping == "ddp":
        state = {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}
    torch.save(state, tmp_path / "theirs.pth")

    assert convert(tmp_path / "theirs.pth", tmp_path / "ours", "--num_attention_heads", "4") == 0

    printed = capsys.readouterr().out
    assumed = "assumed, as the file does not say it: square images, 4 attention heads, layer_norm_eps 1e-6, GELU"
    assert assumed in printed
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    pixel_values = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    logits = ours.double()(pixel_values).logits
    torch.testing.assert_close(logits, theirs.double()(pixel_values), rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"representation_size": 9}], ids=str)
@torch.no_grad()
def test_torchvision_file(options, tmp_path, capsys):
    theirs = tiny_torchvision(**options)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")

    assert convert(tmp_path / "theirs.safetensors", tmp_path / "ours", "--num_attention_heads", "4") == 0

    assert "preprocessor_config.json prepares images" in capsys.readouterr().out
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    pixel_values = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    logits = ours.double()(pixel_values).logits
    torch.testing.assert_close(logits, theirs.double()(pixel_values), rtol=0, atol=1e-10)


@torch.no_grad()
def test_file_of_an_encoder_for_images_that_are_not_square(tmp_path):
    theirs = tiny_timm(img_size=(12, 20), num_classes=0)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    options = ["--num_attention_heads", "4", "--image_size", "12", "20"]

    assert convert(tmp_path / "theirs.pth", tmp_path / "ours", *options) == 0

    ours = AutoModel.from_pretrained(tmp_path / "ours")
    assert ours.config.image_size == [12, 20]
    pixel_values = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    pooled = ours.double()(pixel_values).pooler_output
    torch.testing.assert_close(pooled, theirs.double()(pixel_values), rtol=0, atol=1e-10)


def test_attention_heads_of_a_published_size_are_known(tmp_path):
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=32).state_dict(), tmp_path / "theirs.pth")

    assert convert(tmp_path / "theirs.pth", tmp_path / "ours") == 0

    assert ViTScratchConfig.from_pretrained(tmp_path / "ours").num_attention_heads == 3


# What cannot be converted


def test_destination_that_holds_something_is_refused(tmp_path, capsys):
    tiny_vit().save_pretrained(tmp_path / "theirs")

    message = error_of(capsys, tmp_path / "theirs", tmp_path)

    assert message == f"{tmp_path} exists and is not an empty folder. Choose another destination."


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (
            lambda path: ResNetModel(ResNetConfig(hidden_sizes=[8], depths=[1])).save_pretrained(path),
            "holds ResNetModel; it must be one of ViTModel",
        ),
        (
            lambda path: BertModel(BertConfig(**BERT)).save_pretrained(path),
            "holds BertModel; it must be one of ViTModel",
        ),
        (lambda path: ViTScratchModel(ViTScratchConfig(**TINY)).save_pretrained(path), "a ViTScratch model already."),
        (lambda path: path.mkdir(), "holds no config.json."),
        (lambda path: None, "is neither a file, nor a folder, nor a name on the Hub."),
    ],
    ids=["cnn", "bert", "ours", "empty", "missing"],
)
def test_folder_of_something_else_is_refused(save, message, tmp_path, capsys):
    save(tmp_path / "theirs")

    assert message in error_of(capsys, tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    assert "is neither a file, nor a folder, nor a name on the Hub." in error_of(capsys, "runs/digits", "ours")


BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 3}


def test_timm_cnn_is_refused(tmp_path, capsys):
    save_for_hf(timm.create_model("resnet10t"), tmp_path / "theirs", safe_serialization=True)

    assert "takes VisionTransformer of timm, got ResNet." in error_of(capsys, tmp_path / "theirs", tmp_path / "ours")


def test_folder_with_weights_of_another_width_is_refused(tmp_path, capsys):
    tiny_vit(hidden_size=64).save_pretrained(tmp_path / "theirs")
    save_file(tiny_vit().state_dict(), tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})

    message = error_of(capsys, tmp_path / "theirs", tmp_path / "ours")

    assert "holds other weights than its config.json says: classifier.weight" in message


def test_folder_with_missing_weights_is_refused(tmp_path, capsys):
    theirs = tiny_vit()
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.config.num_hidden_layers = 3
    theirs.config.save_pretrained(tmp_path / "theirs")

    message = error_of(capsys, tmp_path / "theirs", tmp_path / "ours")

    assert "holds other weights than its config.json says: vit.layers.2.attention.k_proj.bias" in message


def test_truncated_folder_is_refused(tmp_path, capsys):
    tiny_vit().save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    assert "is truncated, not there, or of another kind" in error_of(capsys, tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("name", ["theirs.pth", "theirs.safetensors"])
@pytest.mark.parametrize("content", ["half", "text", "nothing"])
def test_damaged_file_is_refused(name, content, tmp_path, capsys):
    path = tmp_path / name
    (save_file if path.suffix == ".safetensors" else torch.save)(tiny_timm().state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes({"half": whole[: len(whole) // 2], "text": b"A ViT.", "nothing": b""}[content])

    assert f"{name} is truncated, not there, or of another kind" in error_of(capsys, path, tmp_path / "ours")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            lambda: resnet18().state_dict(),
            r"holds no Vision Transformer of timm (patch_embed.proj.weight) or torchvision",
        ),
        (
            lambda: tiny_timm(init_values=0.1).state_dict(),
            "no plain Vision Transformer: we have no counterpart of blocks.0.ls1.gamma.",
        ),
        (
            lambda: tiny_timm(reg_tokens=2).state_dict(),
            "no plain Vision Transformer: we have no counterpart of reg_token.",
        ),
        (
            lambda: tiny_timm(no_embed_class=True).state_dict(),
            "embeddings.position_embeddings is (1, 16, 32), not (1, 10",
        ),
        (
            lambda: tiny_timm().state_dict() | {"head.weight": torch.zeros(5, 31)},
            "classifier.weight is (5, 31), not (5, 32)",
        ),
        (
            lambda: {"patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)},
            "the counterpart of embeddings.position_embeddings, layers.0.mlp.fc1.weight is missing",
        ),
        (
            lambda: tiny_timm().state_dict() | {"patch_embed.proj.weight": torch.zeros(9)},
            "projection.weight is missing, or has a wrong number of axes.",
        ),
        (
            lambda: tiny_timm().state_dict() | {"fc_norm.weight": torch.ones(32)},
            "fc_norm.weight has the place of another weight.",
        ),
        (lambda: {"epoch": 3}, "holds no weights by name."),
        (lambda: {1: torch.zeros(2)}, "holds no weights by name."),
        (
            lambda: tiny_timm().state_dict() | {"blocks.0.attn.qkv.weight": torch.zeros(2, 32)},
            "layers.0.attention.q_proj.weight is (1, 32), not (32, 32)",
        ),
        (lambda: [3], "holds no weights by name."),
    ],
    ids=[
        "cnn",
        "layer_scale",
        "registers",
        "no_embed_class",
        "width",
        "no_layers",
        "patches",
        "two_norms",
        "no_tensor",
        "no_name",
        "qkv",
        "list",
    ],
)
def test_file_of_something_else_is_refused(state, message, tmp_path, capsys):
    torch.save(state(), tmp_path / "theirs.pth")

    assert message in error_of(capsys, tmp_path / "theirs.pth", tmp_path / "ours", "--num_attention_heads", "4")


def test_pickled_module_is_not_executed(tmp_path, capsys):
    torch.save(tiny_timm(), tmp_path / "theirs.pth")

    assert "is truncated, not there, or of another kind" in error_of(
        capsys, tmp_path / "theirs.pth", tmp_path / "ours"
    )


def test_unknown_number_of_attention_heads_is_asked_for(tmp_path, capsys):
    torch.save(tiny_timm().state_dict(), tmp_path / "theirs.pth")

    message = error_of(capsys, tmp_path / "theirs.pth", tmp_path / "ours")

    assert message.endswith("share its hidden size of 32: give --num_attention_heads.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--num_attention_heads", "4", "--image_size", "16", "24", "16"],
            "of at least 1, got [16, 24, 16]",
        ),
        (["--num_attention_heads", "5"], "hidden_size (32) must be divisible by num_attention_heads (5)."),
        (["--num_attention_heads", "4", "--image_size", "24"], "position_embeddings is (1, 17, 32), not (1, 37, 32)."),
    ],
)
def test_option_that_does_not_fit_the_file_is_refused(options, message, tmp_path, capsys):
    torch.save(tiny_timm().state_dict(), tmp_path / "theirs.pth")

    assert message in error_of(capsys, tmp_path / "theirs.pth", tmp_path / "ours", *options)


def test_option_for_files_is_refused_with_a_folder(tmp_path, capsys):
    tiny_vit().save_pretrained(tmp_path / "theirs")

    message = error_of(capsys, tmp_path / "theirs", tmp_path / "ours", "--image_size", "24")

    assert message.endswith("is not. Leave them out.")
    assert "is neither a file" in error_of(capsys, tmp_path / "theirs.pth", tmp_path / "ours", "--image_size", "24")


def test_unknown_architecture_is_refused(tmp_path, capsys):
    tiny_vit().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MyViT"]}))

    message = error_of(capsys, tmp_path / "theirs", tmp_path / "ours")

    assert "holds MyViT; it must be one of ViTModel" in message


def test_destination_under_a_file_is_refused(tmp_path, capsys):
    tiny_vit().save_pretrained(tmp_path / "theirs")
    (tmp_path / "file").touch()

    assert "Not a directory" in error_of(capsys, tmp_path / "theirs", tmp_path / "file" / "ours")


# The table


def test_verify_prints_every_peer_within_its_limits(capsys):
    assert main(["--verify"]) == 0

    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| t")]
    assert [row[0].removeprefix("| ") for row in rows] == [peer.name for peer in PEERS]
    assert all(len(row) == 9 and row[1].count("e") == 2 for row in rows)
    assert f"timm {version('timm')}" in printed
    assert "All are within the limits." in printed


def test_verify_lists_a_peer_that_is_not_installed_as_such(capsys, monkeypatch):
    def without_timm(package):
        if package == "timm":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(parity, "version", without_timm)
    monkeypatch.setattr(parity, "PEERS", [peer for peer in PEERS if peer.package == "timm"])

    main(["--verify"])

    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| timm")]
    assert len(rows) == 3
    assert all(row.count("not installed") == 8 and "e-" not in row for row in rows)


def test_verify_fails_when_a_limit_is_exceeded(capsys, monkeypatch):
    monkeypatch.setattr(parity, "PEERS", PEERS[:1])
    monkeypatch.setattr(parity, "limit", lambda kind, dtype, std: 0.0)

    assert main(["--verify"]) == 1

    assert "Those in bold exceed their limit." in capsys.readouterr().out


def test_table_of_the_documentation_has_a_row_for_every_peer():
    text = EXACTNESS.read_text(encoding="utf-8")

    assert all(f"\n| {peer.name} | " in text for peer in PEERS)


def test_nan_is_a_difference():
    one, other = {"logits": torch.tensor([1.0, math.nan])}, {"logits": torch.tensor([1.0, 2.0])}

    assert math.isnan(largest_differences(one, other)["outputs"])
    assert math.isnan(largest_differences(one | {"loss": torch.ones(1)}, other | {"loss": torch.zeros(1)})["outputs"])


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"logits": torch.ones(1)}, {"loss": torch.ones(1)}, r"No output in common: logits and loss\."),
        (
            {"logits": torch.ones(1), "hidden_states.3": torch.ones(1)},
            {"logits": torch.ones(1)},
            r"has hidden_states\.3",
        ),
        ({"logits": torch.ones(1)}, {"logits": torch.ones(2)}, r"logits has the shapes \(1,\) and \(2,\)"),
    ],
    ids=["outputs", "layers", "shapes"],
)
def test_what_cannot_be_compared_is_an_error(one, other, message):
    with pytest.raises(ValueError, match=message):
        largest_differences(one, other)


def test_command_without_a_destination_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["somewhere"])

    assert "give SOURCE and DESTINATION, or --verify" in capsys.readouterr().err
