"""Checksums of checkpoints: which files are as they were saved."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

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
