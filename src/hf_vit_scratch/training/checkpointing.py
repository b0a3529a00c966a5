"""Checkpoints that are whole or not counted: checksums, and the step by which one gets its name."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from ..errors import UserError

CHECKSUMS = "SHA256SUMS"  # `sha256sum --check SHA256SUMS` verifies a folder, too
TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")  # of what somebody might load


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Write the SHA-256 of files, by their names, into `folder`, in the format of the program sha256sum."""
    lines = []
    for file in sorted(file for file in files if file.name != CHECKSUMS):
        with file.open("rb") as content:
            lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def damaged_files(folder: Path) -> list[str]:
    """Return the files that are not as they were saved: changed, missing, or tensors unknown to the checksums.

    None if it has no checksums: the stock Trainer writes none.

    Args:
        folder: A checkpoint.
    """
    if not (folder / CHECKSUMS).is_file():
        return []
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return [CHECKSUMS]
    if not all(re.fullmatch(r"[0-9a-f]{64}  [^/]+", line) for line in lines):
        return [CHECKSUMS]
    wanted = {line[66:]: line[:64] for line in lines}
    present = {file.name: file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS}
    unknown = {name for name in present.keys() - wanted.keys() if Path(name).suffix in TENSOR_SUFFIXES}
    damaged = (wanted.keys() - present.keys()) | unknown
    for name in wanted.keys() & present.keys():
        with present[name].open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != wanted[name]:
                damaged.add(name)
    return sorted(damaged)


def refuse_damage(checkpoint: Path) -> None:
    """Check that the files of a checkpoint are as they were saved.

    Raises:
        UserError: Names those that are not.
    """
    if damaged := damaged_files(checkpoint):
        raise UserError(f"{checkpoint} is damaged ({', '.join(damaged)}) and cannot be loaded.")


def publish(staged: Path, final: Path, best: Path, limit: int | None) -> None:
    """Give a checkpoint its name, once its files and their checksums are on the disk; then delete old ones.

    What is deleted loses its name first, so a kill never leaves half a checkpoint under a final name.

    Args:
        staged: Folder of the new checkpoint, within a folder for incomplete ones.
        final: Its final name, beside the other checkpoints.
        best: Checkpoint to keep and to link as `best`; `Path("")` for none.
        limit: Largest number of checkpoints to keep; `None` keeps all.
    """
    staging = staged.parent
    write_checksums(staged, (file for file in staged.iterdir() if file.is_file()))
    for path in [*staged.rglob("*"), staged]:
        write_through(path)
    if final.exists():  # of an earlier attempt at the same step
        os.replace(final, staging / "replaced")
    os.replace(staged, final)
    write_through(final.parent)
    for link, target in (("last", final), ("best", best)):
        if target.name and target.is_dir() and target.parent.resolve() == final.parent.resolve():
            aside = final.parent / f".{link}"
            aside.unlink(missing_ok=True)
            aside.symlink_to(target.name)
            os.replace(aside, final.parent / link)
    if limit:
        kept = {str(final), str(best)}
        oldest_first = sort_checkpoints(str(final.parent), use_mtime=True)
        surplus = len(oldest_first) - max(limit, len(kept & {*oldest_first}))
        for old in [path for path in oldest_first if path not in kept][: max(surplus, 0)]:
            os.replace(old, staging / Path(old).name)
    shutil.rmtree(staging, ignore_errors=True)


def write_through(path: Path) -> None:
    """Make sure that a file, or the names in a folder, would survive a loss of power (fsync)."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
