"""Fixtures, and the settings that keep every test offline, on the CPU, and out of the user's own folders."""

import os
import signal
import tempfile

# Before torch and the Hugging Face libraries are imported, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models are fastest on one thread
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_vit_scratch_tests_")

import functools
import gc
import shutil
from collections.abc import Iterator

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers.utils import logging as transformers_logging

from hf_vit_scratch.data import sources

torch.set_num_threads(1)
sources.load_digits = functools.cache(sources.load_digits)  # most runs take them
# Garbage collection ends the queue to a loader's worker first. The worker is then ended after so many seconds, not 5.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
datasets.disable_progress_bars()
transformers_logging.disable_progress_bar()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _imports_are_no_garbage() -> Iterator[None]:
    # The Trainer orders a search for garbage for each run: a third of a second among all that has been imported.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def photographs() -> list[Image.Image]:
    """The two real photographs that ship inside scikit-learn (a temple and a flower, 640x427 pixels)."""
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


@pytest.fixture
def class_folders(tmp_path, photographs):
    """A folder of two class folders, each with twelve crops of one of the photographs."""
    root = tmp_path / "photos"
    for name, photograph in zip(("temple", "flower"), photographs, strict=True):
        (root / name).mkdir(parents=True)
        for number in range(12):
            left, top = 40 * number, 20 * number
            photograph.crop((left, top, left + 96, top + 64)).save(root / name / f"{number:02}.jpg", quality=90)
    return root


@pytest.fixture(autouse=True)
def heed_ctrl_c():
    """Set Python's own handler of Ctrl-C, which an earlier test or a shell in the background may have replaced."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
