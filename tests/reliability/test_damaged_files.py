"""Checkpoints and models whose files are damaged, or were made to do harm."""

import logging
import pickle
import random
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_script import SMALL, train
from test_trainer import make_trainer

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.checkpointing import CHECKSUMS, damaged_files, finish_checkpoint
from hf_vit_scratch.training.recipe import Recipe
from hf_vit_scratch.training.run_directory import resolve_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the checkpoints 2 and 4, with all kinds of files."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, max_steps=4, save_strategy="steps", save_steps=2, ema_decay=0.5, muon=True)
    trainer.train()
    return folder


def to_resume(folder, wanted="true"):
    return ViTTrainingArguments(output_dir=str(folder), use_cpu=True, resume_from_checkpoint=wanted)


def damage(draws, content):
    """The content after one to three flipped bits, or cut off."""
    if not content or draws.random() < 0.3:
        return content[: draws.randrange(max(len(content), 1))]
    changed = bytearray(content)
    for place in draws.sample(range(len(changed)), min(len(changed), draws.randint(1, 3))):
        changed[place] ^= 1 << draws.randrange(8)
    return bytes(changed)


def test_every_damage_to_a_checkpoint_is_found_and_the_one_before_is_taken(run, caplog, figure):
    draws, number = random.Random(0), 500
    newest, older = run / "checkpoint-4", run / "checkpoint-2"
    files = sorted(file for file in newest.iterdir() if file.is_file() and file.stat().st_size)
    for _ in range(number):
        file = draws.choice(files)
        whole = file.read_bytes()
        file.write_bytes(damage(draws, whole))
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                assert resolve_checkpoint(to_resume(run), Recipe()) == older, file
            names = "" if file.name == CHECKSUMS else f"({file.name})"
            assert f"{newest} is damaged {names}" in caplog.text
        finally:
            file.write_bytes(whole)
    assert resolve_checkpoint(to_resume(run), Recipe()) == newest
    figure(f"{number} damaged files of checkpoints: all found, the checkpoint before taken")


def test_file_that_is_missing_is_damage(run, tmp_path):
    folder = shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    assert damaged_files(folder) == []
    (folder / "optimizer.pt").unlink()
    assert damaged_files(folder) == ["optimizer.pt"]


def test_checkpoint_that_is_named_must_be_whole(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (folder / "checkpoint-4" / "scheduler.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint-4 is incomplete or damaged \(scheduler\.pt\)"):
        resolve_checkpoint(to_resume(folder, str(folder / "checkpoint-4")), Recipe())
    (folder / "checkpoint-2" / "scheduler.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no complete checkpoint to resume from\."):
        resolve_checkpoint(to_resume(folder), Recipe())


def test_damaged_checkpoint_is_not_loaded_by_the_trainer_either(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (folder / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    trainer = make_trainer(folder, max_steps=4, ema_decay=0.5, muon=True)
    with pytest.raises(UserError, match=r"checkpoint-2 is incomplete or damaged \(model\.safetensors\)"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.state.best_model_checkpoint = str(folder / "checkpoint-2")
    with pytest.raises(UserError, match="checkpoint-2 is incomplete or damaged"):
        trainer._load_best_model()


def test_run_goes_on_from_the_checkpoint_before_the_damaged_one_to_the_same_weights(tmp_path):
    argv = [*SMALL, "--max_steps", "9", "--save_strategy", "steps", "--save_steps", "3", "--eval_strategy", "no",
            "--load_best_model_at_end", "false", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    train.main(argv)
    expected = (tmp_path / "run" / "model.safetensors").read_bytes()
    optimizer = tmp_path / "run" / "checkpoint-9" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])

    train.main([*argv, "--resume_from_checkpoint", "true"])

    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected
    assert damaged_files(tmp_path / "run" / "checkpoint-9") == []


def test_checksums_are_those_of_the_usual_program(run):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=run / "checkpoint-4", capture_output=True
    )
    assert done.returncode == 0, done.stdout


def test_weights_that_were_replaced_on_purpose_load_like_those_of_any_model(run, tmp_path):
    folder = shutil.copytree(run / "checkpoint-2", tmp_path / "model")
    state = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    loaded = ViTScratchForImageClassification.from_pretrained(folder).state_dict()

    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_weights_that_are_a_pickle_are_refused(run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(run / "checkpoint-2", folder, ignore=shutil.ignore_patterns("*.safetensors", CHECKSUMS))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    for options in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            ViTScratchForImageClassification.from_pretrained(folder, **options)
    assert not (tmp_path / "harm").exists()


def test_pickle_beside_safetensors_is_not_read(run, tmp_path):
    folder = shutil.copytree(run / "checkpoint-2", tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    ViTScratchForImageClassification.from_pretrained(folder, use_safetensors=False)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_code_in_a_checkpoint_is_not_run(name, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    checkpoint = folder / "checkpoint-2"
    torch.save(Harmful(tmp_path / "harm"), checkpoint / name)
    finish_checkpoint(checkpoint, best=None, limit=None)  # whoever puts code there makes the checksums fit, too
    trainer = make_trainer(folder, max_steps=4, ema_decay=0.5, muon=True)

    if name == "training_args.bin":
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            trainer.train(resume_from_checkpoint=str(checkpoint))

    assert not (tmp_path / "harm").exists()
