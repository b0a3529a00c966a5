"""The folder of a run: who may write there, and what a resumed run goes on from."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data.groups import LISTING
from ..data.images import local_path
from ..data.splits import SPLITS, absolute
from ..errors import UserError, blame_the_files
from .arguments import ViTTrainingArguments
from .checkpointing import complete_checkpoints, find_checkpoint
from .recipe import FACTS, RECIPE, Recipe

LOCK = "_lock"  # marks a folder as in use; a name that begins with "_" is never pushed

# What a resumed run may change: none of it moves a weight. Where an evaluation can, `resolve_checkpoint` refuses more.
RESUMABLE = {
    "output_dir", "resume_from_checkpoint", "logging_steps", "logging_strategy", "report_to", "run_name",
    "disable_tqdm", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_pin_memory", "save_steps", "save_strategy", "save_total_limit", "eval_steps", "eval_strategy",
    "per_device_eval_batch_size", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "license", "use_cpu",
}  # fmt: skip


@contextmanager
def lock_run_directory(args: ViTTrainingArguments) -> Iterator[None]:
    """Keep other runs out of `output_dir`. The system releases the lock when the process ends, however it ends."""
    output_dir = Path(args.output_dir)
    if not args.should_save or output_dir.is_file():  # `resolve_checkpoint` refuses a file
        yield
        return
    lock = FileLock(output_dir / LOCK)
    with blame_the_files(f"{output_dir} cannot be written to"):
        output_dir.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"another run is writing into {output_dir}. Choose another --output_dir, or wait for its end."
            ) from error
    with held:
        try:
            yield
        finally:  # nothing stays if a mistake was found before anything was written, but on Windows the lock
            with suppress(OSError):
                if [path.name for path in output_dir.iterdir()] == [LOCK]:
                    (output_dir / LOCK).unlink()
                    output_dir.rmdir()


def refuse_place_among_images(output_dir: Path, data: str) -> None:
    """Refuse an output folder inside the folder of the images, where its figures would be taken for images."""
    folder = local_path(data)
    if data != "digits" and folder.is_dir() and output_dir.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"--output_dir {output_dir} is in the folder of the images, {folder.resolve()}: its figures would count "
            "as images. Choose a folder outside."
        )


def resolve_checkpoint(args: ViTTrainingArguments, recipe: Recipe) -> Path | None:
    """Return the checkpoint to continue from, after making sure that no other run is overwritten.

    `--resume_from_checkpoint` takes a folder, or `true` for the newest complete checkpoint in `output_dir`. The recipe
    is compared with that of the run, and takes over what that run chose.
    """
    output_dir, wanted = Path(args.output_dir), str(args.resume_from_checkpoint or "false")
    checkpoint = find_checkpoint({"true": True, "false": False}.get(wanted.lower(), wanted), output_dir)
    if checkpoint is None or checkpoint.resolve().parent != output_dir.resolve():
        _refuse_other_run(output_dir)
    if checkpoint is None:
        args.resume_from_checkpoint = None  # which may be "false"
        return None
    begun = Recipe.load(checkpoint.parent)
    if begun is None and args.fit_to_images:
        raise UserError(
            f"{checkpoint.parent} has no {FACTS}, so what was chosen for its images is not known. Copy that file from "
            f"the folder of the run, or start a new run from the model: --model {checkpoint}."
        )
    if begun is None:
        return checkpoint
    if begun.processes != args.world_size:
        raise UserError(
            f"{checkpoint} belongs to a run of {begun.processes} processes, got {args.world_size}: a step would have "
            f"another number of images. Start {begun.processes} processes."
        )
    was, now = (one.values("recipe", "flag") for one in (begun, recipe))
    # The worker processes of a stream share out its files; other images depend on no number of workers.
    free = RESUMABLE if now.get("streaming") else RESUMABLE | {"dataloader_num_workers"}
    if absolute(str(now.get("data", ""))) == begun.data:  # however it is spelled
        free = free | {"data"}
    follows = args.early_stopping_patience is not None or args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if follows or args.load_best_model_at_end:
        # The result then depends on evaluations, which come with log lines if no eval_steps are set.
        free = free - {"eval_steps", "eval_strategy"}
        free = free - {"save_steps", "save_strategy"} if args.load_best_model_at_end else free
        free = free - {"logging_steps"} if args.eval_strategy == "steps" and now.get("eval_steps") is None else free
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name) and name not in free]
    if changed:
        listed = ", ".join(f"{name} {now.get(name, 'unset')} (was {was.get(name, 'unset')})" for name in changed)
        raise UserError(
            f"{checkpoint} belongs to a run with another recipe: {listed}. Repeat the run's own command, which "
            f"{checkpoint.parent / RECIPE} begins with, and add --resume_from_checkpoint true."
        )
    chosen = {name: setting for name, setting in begun.settings.items() if setting.origin in ("images", "machine")}
    recipe.settings |= {name: setting for name, setting in chosen.items() if name not in recipe.settings}
    recipe.fingerprint = begun.fingerprint
    return checkpoint


def _refuse_other_run(output_dir: Path) -> None:
    """Refuse a folder that holds more than a check, or a run killed before its first checkpoint, leaves behind."""
    replaceable = {output_dir / name for name in (RECIPE, FACTS, "_samples.png", LISTING, SPLITS, LOCK)}
    if (output_dir / RECIPE).is_file():  # without it, checkpoints without checksums are another trainer's
        replaceable |= {*output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")} - {*complete_checkpoints(output_dir)}
        replaceable.add(output_dir / "runs")  # TensorBoard's
    if output_dir.is_file() or {*output_dir.glob("[!.]*")} - replaceable:  # macOS writes .DS_Store
        raise UserError(
            f"{output_dir} is not empty, and a run is never overwritten. Continue it with --resume_from_checkpoint "
            "true, choose another --output_dir, or delete it."
        )


def without_resuming(argv: Sequence[str]) -> list[str]:
    """Return the command line that begins a run, without the flag that resumes it."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume_from_checkpoint", "--resume-from-checkpoint")
    return parser.parse_known_args(argv)[1]
