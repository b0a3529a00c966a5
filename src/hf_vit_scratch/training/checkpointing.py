"""Complete checkpoints: a checkpoint is complete once its checksums are written, and verified before it is loaded."""

import hashlib
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data.images import local_path
from ..errors import UserError

logger = logging.getLogger(__name__)

CHECKSUMS = "SHA256SUMS"  # `sha256sum --check SHA256SUMS` verifies a folder, too


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, newest first."""
    found = [path.parent for path in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{CHECKSUMS}")]
    named = [folder for folder in found if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name)]
    return sorted(named, key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True)


def describe_last_checkpoint(output_dir: str) -> str:
    """Return in words which checkpoint of a run that fails is left."""
    newest = complete_checkpoints(Path(output_dir))
    return f"The last complete checkpoint is {newest[0]}" if newest else "No checkpoint was saved yet"


def find_checkpoint(wanted: str | Path | bool | None, output_dir: str | Path) -> Path | None:
    """Return the wanted checkpoint, verified; for `True`, the newest one of a run that is not damaged."""
    if not wanted:
        return None
    if wanted is True:
        for checkpoint in complete_checkpoints(Path(output_dir)):
            if not (damaged := damaged_files(checkpoint)):
                break
            logger.warning("%s is damaged (%s) and not used.", checkpoint, ", ".join(damaged))
        else:
            raise UserError(
                f"{output_dir} holds no complete checkpoint to resume from. Start without --resume_from_checkpoint, "
                "in another --output_dir."
            )
    else:
        checkpoint = local_path(str(wanted))
        if not (checkpoint / TRAINER_STATE_NAME).is_file():
            raise UserError(
                f"{checkpoint} is not a checkpoint: it holds no {TRAINER_STATE_NAME}. Give a folder checkpoint-N of a "
                "run, or true for the newest one."
            )
        refuse_damage(checkpoint)
    if not (checkpoint / SCHEDULER_NAME).is_file():
        raise UserError(
            f"{checkpoint} holds only the model, as with --save_only_model. A run cannot be resumed from it. Start a "
            f"new one: --model {checkpoint}."
        )
    return checkpoint


def finish_checkpoint(folder: Path, best: Path | None, limit: int | None) -> None:
    """Make a checkpoint complete, link it as `last`, and delete old checkpoints.

    Its files are on the disk before their checksums are, so a crash at any moment leaves either a complete checkpoint
    or one that is not counted. The best checkpoint is kept and linked as `best`. Without a limit, all are kept.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    for path in [*files, *folder.rglob("*/"), folder]:
        write_through(path)
    lines = [f"{_sha256(file)}  {file.relative_to(folder).as_posix()}\n" for file in sorted(files)]
    aside = folder / f".{CHECKSUMS}"
    aside.write_text("".join(lines), encoding="utf-8")
    write_through(aside)
    os.replace(aside, folder / CHECKSUMS)
    for path in (folder, folder.parent):
        write_through(path)
    for link, target in (("last", folder), ("best", best)):
        if target is not None and target.is_dir() and target.parent.resolve() == folder.parent.resolve():
            aside = folder.parent / f".{link}"
            aside.unlink(missing_ok=True)
            place = folder.parent / link
            with suppress(OSError):  # Windows allows links to administrators and developers only
                aside.symlink_to(target.name)
                if not place.is_symlink() and (place / CHECKSUMS).is_file():  # `scp` follows links
                    delete_checkpoint(place)
                try:
                    os.replace(aside, place)
                except PermissionError:  # Windows replaces no link to a folder
                    place.unlink()
                    os.replace(aside, place)
    if limit is not None and limit > 0:  # as in the stock Trainer
        complete = complete_checkpoints(folder.parent)
        others = [path for path in complete if path not in (folder, best)]
        number_kept = len(complete) - len(others)
        for old in others[max(limit - number_kept, 0) :]:
            delete_checkpoint(old)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, its checksums first, so that a crash leaves no damaged one."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def damaged_files(folder: Path) -> list[str]:
    """Return the files of a checkpoint that are changed or missing."""
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return [CHECKSUMS]
    if not lines or not all(re.fullmatch(r"[0-9a-f]{64}  .+", line) for line in lines):
        return [CHECKSUMS]
    expected = {line[66:]: line[:64] for line in lines}
    return [
        name for name, digest in expected.items() if not (folder / name).is_file() or _sha256(folder / name) != digest
    ]


def refuse_damage(checkpoint: Path) -> None:
    """Raise a `UserError` unless the files of a checkpoint are as they were saved."""
    if damaged := damaged_files(checkpoint):
        raise UserError(f"{checkpoint} is incomplete or damaged ({', '.join(damaged)}). Restore it, or use another.")


def write_through(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
