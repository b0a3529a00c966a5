"""The folder of a run: who may write there, and what a resumed run goes on from."""

import logging
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import UserError, blame_the_user
from .arguments import ViTTrainingArguments
from .checkpointing import damaged_files

logger = logging.getLogger(__name__)

# Folder, within that of the run, of a checkpoint that is being written. The Trainer pushes nothing with such a name.
STAGING = "_incomplete"

# File, there, that a run holds locked. What begins with "_" is not pushed.
LOCK = "_lock"

# Before the fingerprint of the images, in a run's `recipe.yaml`.
IMAGES_LINE = "# images: "

# What a resumed run may change: none of it moves a weight.
RESUMABLE = {
    "output_dir", "resume_from_checkpoint", "logging_steps", "logging_strategy", "report_to", "run_name",
    "disable_tqdm", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_pin_memory", "save_steps", "save_strategy", "save_total_limit", "eval_steps", "eval_strategy",
    "per_device_eval_batch_size", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "license", "use_cpu",
}  # fmt: skip


@contextmanager
def claimed(args: ViTTrainingArguments) -> Iterator[None]:
    """Keep other runs out of `output_dir`. The system ends the claim with the process, however that ends.

    Raises:
        UserError: Another run is at work there.
    """
    output_dir = Path(args.output_dir)
    if not args.should_save or output_dir.is_file():  # another process has claimed it; `resolve_checkpoint` refuses it
        yield
        return
    with blame_the_user():
        output_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output_dir / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"another run is writing into {output_dir}. Choose another --output_dir, or wait for its end."
        ) from error
    except OSError as error:
        raise UserError(f"{output_dir} cannot be written to: {error}.") from error
    try:
        yield
    finally:
        if [path.name for path in output_dir.iterdir()] == [LOCK]:  # a mistake was found before anything was written
            with suppress(OSError):
                (output_dir / LOCK).unlink()
                output_dir.rmdir()
        lock.release()


def resolve_checkpoint(args: ViTTrainingArguments, recipe: str = "") -> str | None:
    """The checkpoint to continue from, after making sure that no other run is overwritten.

    `--resume_from_checkpoint` takes a folder, or `true` for the newest checkpoint in `output_dir`.

    Args:
        args: The arguments.
        recipe: The resolved recipe, to be compared with that of the run.

    Raises:
        UserError: `output_dir` holds a run that is not to be continued, there is no checkpoint to continue from, or
            the run was begun with another recipe.
    """
    checkpoint = _find_checkpoint(args)
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is not None and begun.is_file():
        was, now = (yaml.safe_load(text) or {} for text in (begun.read_text(encoding="utf-8"), recipe))
        # Each worker process reads its own part of a stream.
        free = {*RESUMABLE} if now.get("streaming") else {*RESUMABLE, "dataloader_num_workers"}
        if now.get("fit_to_images"):  # what the run has chosen for itself is taken over: `chosen_before`
            free |= was.keys() - now.keys()
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name) and name not in free]
        if changed:
            listed = ", ".join(f"{name} {now.get(name, 'unset')} (was {was.get(name, 'unset')})" for name in changed)
            raise UserError(
                f"{checkpoint} belongs to a run with another recipe: {listed}. Repeat the run's own command, which "
                f"{begun} begins with, and add --resume_from_checkpoint true."
            )
    return checkpoint


def chosen_before(checkpoint: str | None, given: Set[str]) -> dict[str, Any]:
    """Return the values that the run of a checkpoint chose by its images; none without a checkpoint.

    Args:
        checkpoint: The result of `resolve_checkpoint`.
        given: Names of the fields set by a recipe or a flag.
    """
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is None or not begun.is_file():
        return {}
    was = yaml.safe_load(begun.read_text(encoding="utf-8")) or {}
    return {name: value for name, value in was.items() if name not in given}


def without_resuming(argv: Sequence[str]) -> list[str]:
    """The command line by which a run begins, also where it is resumed."""
    kept, arguments = [], iter(argv)
    for argument in arguments:
        if argument.split("=")[0].replace("-", "_") != "__resume_from_checkpoint":
            kept.append(argument)
        elif "=" not in argument:
            next(arguments, None)  # its value
    return kept


def refuse_other_images(checkpoint: str | None, images: str) -> None:
    """Refuse to resume where images were added or taken away: the splits would be cut anew.

    Args:
        checkpoint: From `resolve_checkpoint`.
        images: The `fingerprint` of the splits.

    Raises:
        UserError: The run began with other images.
    """
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is None or not begun.is_file():
        return
    was = re.search(rf"^{IMAGES_LINE}(.+)$", begun.read_text(encoding="utf-8"), re.MULTILINE)
    if was is not None and was[1] != images:
        raise UserError(
            f"{checkpoint} belongs to a run with other images: {was[1]}, now {images}. The splits would be cut anew, "
            "so that images of training could come into the test split. Give the images back that the run began with, "
            "each under its old name, or start a new run."
        )


def _find_checkpoint(args: ViTTrainingArguments) -> str | None:
    output_dir = Path(args.output_dir)
    wanted = str(args.resume_from_checkpoint or "false")
    if wanted.lower() == "true":
        # The Trainer writes this file last, so a folder without it was cut off while it was being saved.
        complete = [state.parent for state in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")]
        if not complete:
            raise UserError(
                f"{output_dir} holds no checkpoint to resume from. Start without --resume_from_checkpoint."
            )
        for folder in sorted(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True):
            damaged = damaged_files(folder)
            if not damaged:
                return str(folder)
            logger.warning("%s is damaged (%s) and not used.", folder, ", ".join(damaged))
        raise UserError(f"{output_dir} holds no checkpoint that is not damaged. Start anew in another --output_dir.")

    checkpoint = None if wanted.lower() == "false" else Path(wanted)
    if checkpoint is not None and not (checkpoint / "trainer_state.json").is_file():
        raise UserError(f"--resume_from_checkpoint: {wanted} is no checkpoint (it holds no trainer_state.json).")
    if checkpoint is not None and (damaged := damaged_files(checkpoint)):
        raise UserError(
            f"--resume_from_checkpoint: {wanted} is damaged ({', '.join(damaged)}). With `true` the newest checkpoint "
            "that is not damaged is taken."
        )
    if checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve():
        return str(checkpoint)
    # What a check, or a run that was killed before its first checkpoint, leaves can be overwritten.
    remains = {"recipe.yaml", "samples.png", STAGING, LOCK}
    if output_dir.exists() and (not output_dir.is_dir() or {path.name for path in output_dir.iterdir()} - remains):
        raise UserError(
            f"{output_dir} is not empty, and a run is never overwritten. Continue it with "
            "--resume_from_checkpoint true, choose another --output_dir, or delete it."
        )
    return None if checkpoint is None else str(checkpoint)
