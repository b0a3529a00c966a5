"""Complete checkpoints, on their own; damage is in tests/reliability/test_damaged_files.py."""

import os
import shutil
from pathlib import Path

import pytest

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.checkpointing import (
    CHECKSUMS,
    complete_checkpoints,
    damaged_files,
    find_checkpoint,
    finish_checkpoint,
)


@pytest.fixture
def make(tmp_path):
    """Write the files of a checkpoint, and make it complete if `limit` is given."""

    def make(step, **finish):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "shards").mkdir(parents=True)
        for name in ("model.safetensors", "scheduler.pt", "trainer_state.json", "shards/0.distcp"):
            (folder / name).write_text(f"{name} {step}")
        if finish:
            finish_checkpoint(folder, **{"best": None} | finish)
        return folder

    return make


def test_checkpoint_counts_once_it_is_finished(make, tmp_path):
    half = make(9)
    whole = make(10, limit=None)

    assert complete_checkpoints(tmp_path) == [whole]
    assert damaged_files(half) == [CHECKSUMS]
    assert find_checkpoint(True, tmp_path) == whole


def test_system_that_forbids_links_has_none(make, tmp_path, monkeypatch):
    def forbid(self, target):
        raise OSError("A required privilege is not held by the client")

    monkeypatch.setattr("pathlib.Path.symlink_to", forbid)
    folder = make(3, limit=1)
    assert complete_checkpoints(tmp_path) == [folder]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


def test_system_that_replaces_no_link_has_the_new_one(make, tmp_path, monkeypatch):
    replace = os.replace

    def refuse(source, target):
        if Path(target).is_symlink():
            raise PermissionError("Access is denied")
        replace(source, target)

    make(1, limit=None)
    monkeypatch.setattr("os.replace", refuse)
    make(2, limit=None)

    assert (tmp_path / "last").resolve().name == "checkpoint-2"


def test_copy_in_the_place_of_a_link_gives_way_to_the_next_link(make, tmp_path):
    first = make(1, limit=None)
    (tmp_path / "last").unlink()
    shutil.copytree(first, tmp_path / "last")  # as `scp -r` and `zip` do, which follow links

    make(2, limit=None)

    assert (tmp_path / "last").resolve().name == "checkpoint-2"
    assert not (tmp_path / ".last").is_symlink()


def test_checkpoint_in_the_home_folder_is_found(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = make(1, limit=None)

    assert find_checkpoint("~/checkpoint-1", "elsewhere") == checkpoint


def test_newest_is_the_one_with_the_largest_step(make, tmp_path):
    assert [make(step, limit=None) for step in (10, 9, 2)] == complete_checkpoints(tmp_path)


def test_file_in_a_folder_of_the_checkpoint_is_verified(make):
    folder = make(1, limit=None)
    (folder / "shards" / "0.distcp").write_text("another")

    assert damaged_files(folder) == ["shards/0.distcp"]


def test_list_of_checksums_that_is_empty_verifies_nothing(make):
    folder = make(1, limit=None)
    (folder / CHECKSUMS).write_text("")

    assert damaged_files(folder) == [CHECKSUMS]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [4, 3, 2, 1]),
        (-1, None, [4, 3, 2, 1]),
        (2, None, [4, 3]),
        (2, 1, [4, 1]),
        (1, None, [4]),
        (1, 1, [4, 1]),
    ],
)
def test_old_checkpoints_go_and_the_best_and_the_newest_stay(limit, best, kept, make, tmp_path):
    best_folder = None if best is None else tmp_path / f"checkpoint-{best}"
    for step in (1, 2, 3, 4):
        make(step, limit=limit, best=best_folder)

    assert [int(path.name.partition("-")[2]) for path in complete_checkpoints(tmp_path)] == kept
    assert (tmp_path / "last").resolve().name == "checkpoint-4"
    assert (tmp_path / "best").exists() == (best is not None)


def test_nothing_is_resumed_unless_it_is_asked_for(make, tmp_path):
    make(1, limit=None)

    assert find_checkpoint(None, tmp_path) is None
    assert find_checkpoint(False, tmp_path) is None


def test_checkpoint_that_is_named_must_be_finished(make, tmp_path):
    with pytest.raises(UserError, match=rf"checkpoint-1 is incomplete or damaged \({CHECKSUMS}\)"):
        find_checkpoint(make(1), tmp_path)


def test_incomplete_checkpoints_and_copies_do_not_count(make, tmp_path):
    make(9)
    make(1, limit=None).rename(tmp_path / "checkpoint-1-backup")
    for step in (2, 3, 4):
        make(step, limit=2)

    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3"]
    assert (tmp_path / "checkpoint-1-backup").is_dir()
