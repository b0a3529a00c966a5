"""The command line that writes a vector for each image."""

import os
import re
import sys

import numpy as np
import pyarrow.parquet
import pytest
from helpers import TINY, randomize_
from PIL import Image
from transformers import ResNetConfig, ResNetModel, ViTImageProcessor, ViTMAEConfig, ViTMAEModel, pipeline

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchForMaskedImageModeling
from hf_vit_scratch.evaluation import embed


@pytest.fixture
def saved(tmp_path):
    """Saves a model with random weights, and returns its folder."""

    def save(model_class=ViTScratchForImageClassification, **fields):
        randomize_(model_class(ViTScratchConfig(**TINY | fields)), 0.2).save_pretrained(tmp_path / "model")
        ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.fixture
def photos(tmp_path, photographs):
    """A folder of three images and a broken one, which comes second."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    photographs[0].crop((0, 0, 90, 60)).save(folder / "a.png")
    (folder / "b.png").write_bytes(b"no image")
    photographs[1].convert("L").save(folder / "c.jpg")
    photographs[1].crop((100, 0, 200, 60)).save(folder / "more" / "d.png")
    return folder


def read(path):
    """The names and vectors of a file."""
    if path.suffix.lower() == ".npz":
        with np.load(path) as arrays:
            return arrays["image"].tolist(), arrays["embedding"]
    table = pyarrow.parquet.read_table(path).to_pydict()
    return table["image"], np.array(table["embedding"])


def test_map_of_one_place_is_a_vector(photos, tmp_path):
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}, do_convert_rgb=True).save_pretrained(tmp_path / "model")

    vit_scratch.main(["embed", str(tmp_path / "model"), str(photos), "--output", str(tmp_path / "vectors.npz")])

    assert read(tmp_path / "vectors.npz")[1].shape == (3, 8)


@pytest.mark.parametrize("suffix", [".parquet", ".npz", ".NPZ"])
@pytest.mark.parametrize(
    ("model_class", "fields"),
    [(ViTScratchForImageClassification, {}), (ViTScratchForMaskedImageModeling, {"pooling": "mean"})],
    ids=["classifier", "encoder"],
)
def test_vectors_are_those_of_the_pipeline(model_class, fields, suffix, saved, photos, tmp_path, capsys):
    model, output = saved(model_class, **fields), tmp_path / "new" / f"vectors{suffix}"

    code = vit_scratch.main(["embed", model, str(photos), "--output", str(output), "--batch_size", "2"])

    names, vectors = read(output)
    extract = pipeline("image-feature-extraction", model=model, device="cpu", pool=True)
    assert names == [str(photos / name) for name in ("a.png", "c.jpg", "more/d.png")]
    for name, vector in zip(names, vectors, strict=True):
        with Image.open(name) as image:
            assert vector.tolist() == pytest.approx(extract(image)[0], abs=1e-5)
    assert code == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.match(r"vit-scratch embed: .*b\.png cannot be decoded as an image", first)
    assert second == "vit-scratch embed: 1 of 4 images cannot be decoded"


def test_vectors_are_kept_without_the_other_tokens(saved, photos, tmp_path, monkeypatch):
    kept, table = [], pyarrow.table
    monkeypatch.setattr(pyarrow, "table", lambda columns: kept.extend(columns["embedding"]) or table(columns))

    vit_scratch.main(["embed", saved(pooling="cls"), str(photos), "--output", str(tmp_path / "vectors.parquet")])

    assert [vector.base for vector in kept] == [None] * 3


def test_folder_in_the_place_of_the_file_is_refused_before_anything_is_computed(
    saved, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(embed, "forward", None)
    (tmp_path / "folder.npz").mkdir()

    assert vit_scratch.main(["embed", saved(), str(photos), "--output", str(tmp_path / "folder.npz")]) == 2

    assert "--output must be a file, but" in capsys.readouterr().err


def test_another_format_is_refused_before_anything_is_computed(saved, photos, tmp_path, capsys):
    assert vit_scratch.main(["embed", "no_model", str(photos), "--output", str(tmp_path / "vectors.csv")]) == 2
    assert capsys.readouterr().err == (
        f"vit-scratch embed: error: --output must end in .parquet or .npz, got {tmp_path}/vectors.csv.\n"
    )


def test_model_without_a_pooled_vector_is_refused(tmp_path, photos, capsys):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTMAEModel(ViTMAEConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(tmp_path / "m")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "m")

    code = vit_scratch.main(["embed", str(tmp_path / "m"), str(photos), "--output", str(tmp_path / "vectors.npz")])

    assert code == 2
    assert "ViTMAEModel returns no pooler_output. Use a model that does." in capsys.readouterr().err


def test_folder_without_an_encoder_is_refused(tmp_path, photos, capsys):
    (tmp_path / "empty").mkdir()
    command = ["embed", str(tmp_path / "empty"), str(photos), "--output", str(tmp_path / "vectors.npz")]
    assert vit_scratch.main(command) == 2
    assert "empty cannot be loaded as an image encoder" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take names in UTF-8 only")
@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_name_that_is_not_in_utf_8_has_a_vector(suffix, saved, photographs, tmp_path):
    photographs[0].resize((30, 20)).save(tmp_path / os.fsdecode(b"caf\xe9.png"))
    output = tmp_path / f"vectors{suffix}"

    assert (
        vit_scratch.main(["embed", saved(), str(tmp_path / os.fsdecode(b"caf\xe9.png")), "--output", str(output)]) == 0
    )

    (name,), vectors = read(output)
    assert name.endswith("caf\ufffd.png")
    assert len(vectors) == 1
