"""What is chosen for the machine that a run is on."""

import ctypes
import os
import platform

# Of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep the memory that is freed, for the next tensors, instead of giving it back to the system.

    A training step on the CPU frees and takes the same hundreds of megabytes again and again. As it comes, glibc gives
    such blocks back at once, and the system has to clear each page anew: hundreds of thousands of page faults in a few
    steps. The process then holds as much memory as it needed at its peak.

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
