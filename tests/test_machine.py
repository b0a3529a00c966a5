"""What is chosen for the machine: seen in a fresh process, as it holds for the whole of one."""

import os
import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource
import torch
from hf_vit_scratch.machine import keep_freed_memory

def step():
    for _ in range(4):
        torch.ones(2**21)  # 8 MiB, freed at once

print(keep_freed_memory())
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it concerns glibc")


def page_faults(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PAGE_FAULTS]
    output = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=True).stdout.split()
    return output[0] == "True", int(output[1])


@glibc_only
def test_memory_that_was_freed_is_used_again():
    was_set, faults = page_faults()
    assert was_set
    assert faults < 10_000  # of 20 tensors of 2,048 pages each; the heap may still grow once


@glibc_only
def test_what_the_user_has_chosen_stays():
    was_set, faults = page_faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert not was_set
    assert faults > 20_000
