"""What is chosen for the machine. What holds for a whole process is tried in a fresh one."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import joblib
import pytest
import torch

from hf_vit_scratch.speed import hardware

PAGE_FAULTS = """
import resource
import runpy
import sys
import torch

keep_freed_memory = runpy.run_path(sys.argv[1])["keep_freed_memory"]  # without the package, whose import takes seconds

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
    command = [sys.executable, "-c", PAGE_FAULTS, hardware.__file__]
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


@pytest.fixture
def cpu(monkeypatch):
    """Pretends to be on a CPU with these capabilities."""

    def pretend(**capabilities):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return pretend


def chosen(given=(), mixed_precision="no"):
    """The precision, and what was said of it."""
    bf16 = mixed_precision == "bf16"
    args = SimpleNamespace(device=torch.device("cpu"), bf16=bf16, mixed_precision=mixed_precision)
    lines = hardware.choose(args, set(given))
    return args.bf16, args.mixed_precision, " ".join(lines)


@pytest.mark.parametrize("name", hardware.BF16_INSTRUCTIONS)
def test_bf16_is_chosen_where_the_cpu_has_instructions_for_it(name, cpu):
    cpu(avx2=True, **{name: True})

    bf16, mixed_precision, said = chosen()

    assert (bf16, mixed_precision) == (True, "bf16")
    assert "bf16 true" in said


def test_float32_stays_where_the_cpu_has_no_instructions_for_bf16(cpu):
    cpu(avx2=True, avx512_bf16=False)
    assert chosen()[:2] == (False, "no")


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_precision_that_the_user_chose_stays(flag, cpu):
    cpu(avx512_bf16=True)
    assert chosen(given=[flag])[:2] == (False, "no")


def test_precision_that_accelerate_was_told_stays(cpu):
    cpu(avx512_bf16=True)
    assert chosen(mixed_precision="fp16")[:2] == (False, "fp16")


@pytest.mark.parametrize(("instructions", "is_said"), [(True, False), (False, True)])
def test_bf16_that_the_user_chose_where_it_is_slow_stays_and_is_said(instructions, is_said, cpu):
    cpu(avx512_bf16=instructions)
    bf16, mixed_precision, said = chosen(given=["bf16"], mixed_precision="bf16")
    assert (bf16, mixed_precision) == (True, "bf16")
    assert ("no fast bfloat16 is known of this cpu: try --bf16 false" in said) == is_said


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_compiling_needs_a_compiler_and_the_header_files_of_python(device, variable, monkeypatch, tmp_path):
    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.setenv(variable, str(tmp_path / "c++"))
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path))
    assert not hardware.can_compile(device)
    (tmp_path / "Python.h").touch()
    assert hardware.can_compile(device)
    monkeypatch.setenv(variable, "no-such-compiler")
    assert not hardware.can_compile(device)


def test_compiling_for_a_gpu_needs_triton(monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    assert not hardware.can_compile("cuda")


def test_threads_are_no_more_than_the_cores_that_a_container_allows(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert hardware.use_no_more_threads_than_cores()
        assert torch.get_num_threads() == 2
        assert not hardware.use_no_more_threads_than_cores()
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(joblib, "cpu_count", lambda: 0)
    assert not hardware.use_no_more_threads_than_cores()
