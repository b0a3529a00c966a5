"""Memory, threads and precision for the machine that a run is on, unless the user has chosen."""

import ctypes
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import joblib
import torch

# Capabilities of a CPU, as torch names them, by which it multiplies matrices in bfloat16 faster than in float32.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors, and return whether it was set.

    A training step frees and takes the same hundreds of megabytes again and again. By default, glibc returns them to
    the system, which clears each page anew. The process then holds as much memory as it needed at its peak.

    Nothing changes with another C library, nor if the user has chosen (`MALLOC_...`, `GLIBC_TUNABLES`, `LD_PRELOAD`).
    """
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    if chosen or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(-1, -1) and mallopt(-4, 0))  # M_TRIM_THRESHOLD and M_MMAP_MAX of mallopt(3)


def use_no_more_threads_than_cores() -> bool:
    """Limit torch's threads to the cores that a container's quota allows, and return whether that changed anything.

    torch looks at the affinity alone. With more threads than the quota allows, all of them spin while they wait for
    the one that sleeps. Nothing changes if the user has chosen (`OMP_NUM_THREADS`).
    """
    cores = joblib.cpu_count()
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= cores:
        return False
    torch.set_num_threads(cores)
    return True


def bf16_is_fast(device: str) -> bool:
    """Return whether this type of device multiplies matrices in bfloat16 faster than in float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Without the instructions it is up to hundreds of times slower (https://github.com/pytorch/pytorch/issues/146508).
    return device == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)


def can_compile(device: str) -> bool:
    """Return whether torch's compiler finds what it needs for this type of device."""
    compilers = [os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))]
    if device != "cpu":  # Triton, which not every system has, builds the launcher of its kernels in C
        if find_spec("triton") is None:
            return False
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return any(map(shutil.which, compilers)) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def choose(training_args: Any, given: Set[str]) -> list[str]:
    """Set the precisions and the threads that suit the machine, and return what was chosen and why.

    `ViTTrainingArguments` are changed in place. The flags that the user has `given` stay.
    """
    device, choices = training_args.device.type, []
    # What `accelerate launch` was told is a choice, too.
    if not {"bf16", "fp16"} & given and training_args.mixed_precision == "no" and bf16_is_fast(device):
        training_args.bf16, training_args.mixed_precision = True, "bf16"
        choices.append(f"bf16 true: this {device} multiplies matrices faster in bfloat16")
    if training_args.mixed_precision == "bf16" and not bf16_is_fast(device):
        choices.append(f"bf16 as asked, though no fast bfloat16 is known of this {device}: try --bf16 false")
    if device == "cpu" and use_no_more_threads_than_cores():
        choices.append(f"{torch.get_num_threads()} threads: as many cores as this process may use")
    return choices
