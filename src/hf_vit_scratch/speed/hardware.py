"""What is chosen for the machine that a run is on, unless the user has chosen: the one place for it.

Memory, threads, precision, attention.
"""

import ctypes
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Set
from pathlib import Path
from typing import Any

import joblib
import torch

# Of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4

DEFAULT_ATTENTION = "sdpa"  # of transformers
# On a CPU in bfloat16 a training step with the attention written out takes 0.74 to 0.90 of the time with torch's fused
# one, and inference 0.77 to 0.95, at every length measured: 65 to 1,601 tokens, 384 and 768 wide in heads of 64, 4
# layers, medians of 6 rounds in turn, AMD Zen 4, torch 2.15. Memory sets the bound, as the weights of all tokens for
# all tokens are kept for the gradient: training (12 layers, 384 wide, batch 8, one run each) peaks at 1.14 times the
# fused one's memory at 197 tokens, 1.25 at 401, 1.35 at 577 (1.79 with 256 wide in heads of 32), 1.68 at 1,025, and
# 2.11 at 1,601.
MAX_TOKENS_WRITTEN_OUT = 577
# Capabilities of a CPU, as torch names them, by which it multiplies matrices in bfloat16 faster than in float32: a
# training step of models 32 to 128 wide takes 0.8 to 0.56 of its time in float32 (4 layers, 64 tokens, AMD Zen 4).
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def keep_freed_memory() -> bool:
    """Let the C library keep the memory that is freed, for the next tensors, instead of giving it back to the system.

    A training step on the CPU, or a batch of images, frees and takes the same hundreds of megabytes again and again.
    As it comes, glibc gives such blocks back at once, and the system has to clear each page anew: hundreds of
    thousands of page faults in a few steps. The process then holds as much memory as it needed at its peak.

    Nothing is changed where the user has chosen (a variable whose name begins with `MALLOC_`, `GLIBC_TUNABLES`, or
    another allocator in `LD_PRELOAD`), nor with another C library than glibc.

    Returns:
        Whether it was set.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or {"GLIBC_TUNABLES", "LD_PRELOAD"} & set(
        os.environ
    )
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_MMAP_MAX, 0))


def use_no_more_threads_than_cores() -> bool:
    """Give torch as many threads as this process may use cores, by its affinity and by the quota of its container.

    torch looks at the affinity alone. With more threads than the quota allows, all of them spin while they wait for
    the one that has been put to sleep. Nothing is changed where the user has chosen (`OMP_NUM_THREADS`).

    Returns:
        Whether the number was changed.
    """
    cores = joblib.cpu_count()
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= cores:
        return False
    torch.set_num_threads(cores)
    return True


def bf16_is_fast(device: str) -> bool:
    """Whether this type of device multiplies matrices in bfloat16 faster than in float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Without the instructions it is up to hundreds of times slower (https://github.com/pytorch/pytorch/issues/146508).
    return device == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)


def can_compile(device: str) -> bool:
    """Whether torch's compiler finds what it needs for this type of device."""
    if device != "cpu":
        return True  # Triton brings its own
    compiler = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    return shutil.which(compiler) is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


def choose_attention(device: str, num_tokens: int, bf16: bool) -> str:
    """The value of `attn_implementation` that is fastest for so many tokens on this type of device."""
    written_out = device == "cpu" and bf16 and num_tokens <= MAX_TOKENS_WRITTEN_OUT
    return "eager" if written_out else DEFAULT_ATTENTION


def choose_muon_dtype(device: str) -> str:
    """The value of `muon_dtype` that is fastest on this type of device: bfloat16, torch's own, or float32.

    Without instructions for bfloat16 the products of a step of four layers, 128 wide, took 0.9 seconds instead of
    0.03, and the rest of that step, with 128 images of 24x24, 0.2 (two cores of an AMD Zen 3, torch 2.14).
    """
    return "bfloat16" if bf16_is_fast(device) else "float32"


def choose(training_args: Any, config: Any, given: Set[str]) -> list[str]:
    """Set the precisions, the attention and the threads that suit the machine.

    Args:
        training_args: `ViTTrainingArguments`; changed in place.
        config: A `ViTScratchConfig`; changed in place.
        given: Names of the flags that the user has given, which stay.

    Returns:
        What was chosen and why, a line for each.
    """
    device, choices = training_args.device.type, []
    # What `accelerate launch` was told is a choice, too.
    if not {"bf16", "fp16"} & given and training_args.mixed_precision == "no" and bf16_is_fast(device):
        training_args.bf16, training_args.mixed_precision = True, "bf16"
        choices.append(f"bf16 true: this {device} multiplies matrices faster in bfloat16")
    if training_args.mixed_precision == "bf16" and not bf16_is_fast(device):
        choices.append(f"bf16 as asked, though this {device} has no instructions for it: --bf16 false is faster")
    if training_args.muon and training_args.muon_dtype is None:
        training_args.muon_dtype = choose_muon_dtype(device)
        if not bf16_is_fast(device):
            choices.append(f"muon_dtype float32: this {device} has no instructions for bfloat16")
    tokens = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
    attention = choose_attention(device, tokens, training_args.bf16)
    if "attn_implementation" not in given and attention != DEFAULT_ATTENTION:
        config._attn_implementation = attention
        choices.append(f"attn_implementation {attention}: the fastest for {tokens} tokens in bf16")
    if device == "cpu" and use_no_more_threads_than_cores():
        choices.append(f"{torch.get_num_threads()} threads: as many cores as this process may use")
    return choices
