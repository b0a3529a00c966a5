"""Pushing to a Hub and loading from it, by the real client over HTTP; with the package, and without it."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import running_hub
from huggingface_hub import ModelCard
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import AutoModelForMaskedImageModeling, pipeline

from hf_vit_scratch.model.configuration_vit_scratch import AUTO_MAP

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
STRATEGIES = ("every_save", "checkpoint", "end")
# The model alone, as `push_to_hub` of any transformers model gives it.
MODEL = {"README.md", "config.json", "configuration_vit_scratch.py", "model.safetensors", "modeling_vit_scratch.py"}
# What a run pushes.
COMPLETE = MODEL | {"preprocessor_config.json"}
RUNS = {f"tester/{name}" for name in (*STRATEGIES, "encoder", "uploaded")}

PUSH = """
import subprocess, sys
from pathlib import Path
from transformers import (AutoImageProcessor, AutoModelForImageClassification, AutoModelForMaskedImageModeling,
                          pipeline)
import train
from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.evaluation.trust import Trust

folder, image, *strategies = sys.argv[1:]
small = ["--hidden_size", "16", "--num_hidden_layers", "1", "--intermediate_size", "24", "--num_attention_heads", "2",
         "--use_cpu", "true", "--disable_tqdm", "true", "--eval_strategy", "steps", "--eval_steps", "2",
         "--save_strategy", "steps", "--save_steps", "2", "--max_steps", "5", "--push_to_hub", "true",
         "--hub_always_push", "true", "--save_total_limit", "9", "--license", "apache-2.0"]
for strategy in strategies:
    train.main([*small, "--hub_model_id", f"tester/{strategy}", "--hub_strategy", strategy,
                "--output_dir", f"{folder}/{strategy}"])
train.main([*small, "--task", "masked-image-modeling", "--hub_model_id", "tester/encoder", "--output_dir",
            f"{folder}/encoder"])
AutoModelForImageClassification.from_pretrained(f"{folder}/end").push_to_hub("tester/model")
AutoImageProcessor.from_pretrained(f"{folder}/end").push_to_hub("tester/model")
AutoModelForMaskedImageModeling.from_pretrained(f"{folder}/encoder").save_pretrained(
    f"{folder}/saved", push_to_hub=True, repo_id="tester/saved")
again = AutoModelForImageClassification.from_pretrained(f"{folder}/end")
again.config.save_pretrained(f"{folder}/end", push_to_hub=True, repo_id="tester/configuration")
ViTScratchModel(ViTScratchConfig.from_variant("Ti/16", image_size=32, num_hidden_layers=1)).push_to_hub("tester/new")
hf = str(Path(sys.executable).with_name("hf"))  # as in the README
subprocess.run([hf, "upload", "tester/uploaded", f"{folder}/end", "--exclude", "checkpoint-*/*", "--exclude", "_*"],
               check=True)

# With the package, everything loads without trust_remote_code, also if transformers was imported first.
names = ("tester/end", f"{folder}/end")
loaded, local = (pipeline("image-classification", model=name, top_k=10)(image) for name in names)
assert loaded == local, (loaded, local)
# What `predict` needs for "unknown" was pushed with the run, and not with the model alone.
assert Trust.load("tester/end").temperature == Trust.load(f"{folder}/end").temperature
assert Trust.load("tester/model") is None
"""

LOAD = """
import importlib.util, json, sys, tempfile
from pathlib import Path
assert importlib.util.find_spec("hf_vit_scratch") is None, "the package is in the way"
import torch
from transformers import (AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification,
                          AutoModelForMaskedImageModeling, pipeline)

from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:  # before anything has fetched the model's code
    AutoConfig.from_pretrained("tester/end", trust_remote_code=True).save_pretrained(folder)
image, commits = sys.argv[1], json.loads(sys.argv[2])
results = {}
for repo, oid, files in commits:
    remote = {"revision": oid, "trust_remote_code": True}
    outputs = {"model": type(AutoModel.from_pretrained(repo, **remote)).__name__,
               "backbone": AutoBackbone.from_pretrained(repo, **remote).channels}
    if repo in ("tester/encoder", "tester/saved"):
        model = AutoModelForMaskedImageModeling.from_pretrained(repo, **remote)
        pixel_values = torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
        with torch.no_grad():
            outputs["painted"] = model(pixel_values, torch.arange(16)[None] % 2 == 0).reconstruction.tolist()
    elif "preprocessor_config.json" in files:
        outputs["scores"] = pipeline("image-classification", model=repo, top_k=10, **remote)(image)
    if "preprocessor_config.json" in files:
        outputs["features"] = pipeline("image-feature-extraction", model=repo, pool=True, **remote)(image)
    results[f"{repo}@{oid}"] = outputs

# Saved again, without the package.
with tempfile.TemporaryDirectory() as folder:
    model = AutoModelForImageClassification.from_pretrained("tester/end", trust_remote_code=True)
    model.save_pretrained(folder)
    AutoImageProcessor.from_pretrained("tester/end").save_pretrained(folder)
    classify = pipeline("image-classification", model=folder, top_k=10, trust_remote_code=True)
    auto_map = json.loads(Path(folder, "config.json").read_text())["auto_map"]
    larger = {"trust_remote_code": True, "image_size": 16}
    model = AutoModelForImageClassification.from_pretrained(folder, **larger)  # interpolates the positions
    assert model.config.image_size == 16
    results["saved again"] = {"scores": classify(image), "auto_map": auto_map}
print(json.dumps(results))
"""


def run(code, *args, endpoint, home, flags=()):
    """Run Python code against the Hub."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    environment |= {
        "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, *args],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    path = tmp_path_factory.mktemp("photograph") / "temple.png"
    Image.fromarray(load_sample_images().images[0][:96, :128]).save(path)
    return str(path)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory, photograph):
    """All commits after the pushes of `PUSH`, by repository; the folder of the runs; the Hub's address."""
    folder = tmp_path_factory.mktemp("runs")
    with running_hub() as hub:
        run(PUSH, str(folder), photograph, *STRATEGIES, endpoint=hub.endpoint, home=folder / "home")
        yield {repo: commits[1:] for repo, commits in hub.commits.items()}, folder, hub.endpoint


@pytest.fixture(scope="module")
def loaded(pushed, photograph, tmp_path_factory):
    """What a process without the package loads, by commit."""
    commits, _, endpoint = pushed
    ids = json.dumps(
        [(repo, oid, list(files)) for repo, found in commits.items() for oid, _, files in found if set(files) >= MODEL]
    )
    site_packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # -S leaves out the .pth files of editable installations.
    code = f"import sys; sys.path[:0] = {sorted(site_packages)!r}; sys.path = [p for p in sys.path if p]\n{LOAD}"
    home = tmp_path_factory.mktemp("home")
    return json.loads(run(code, photograph, ids, endpoint=endpoint, home=home, flags=("-S", "-P")).splitlines()[-1])


def test_each_strategy_pushes_when_it_says(pushed):
    messages = {repo: [message for _, message, _ in commits] for repo, commits in pushed[0].items()}

    training = ["Training in progress, step 2", "Training in progress, step 4", "Training in progress, step 5"]
    assert messages["tester/every_save"] == [*training, "End of training"]
    assert messages["tester/end"] == ["End of training"]
    assert set(messages["tester/checkpoint"]) == {
        *training, *(f"{message}, checkpoint" for message in training), "End of training",
    }  # fmt: skip
    assert messages["tester/model"][0] == "Upload ViTScratchForImageClassification"


def test_every_commit_is_complete(pushed):
    for repo, commits in pushed[0].items():
        for _, message, files in commits:
            expected = COMPLETE if repo in RUNS else MODEL
            if repo == "tester/configuration":
                expected = {"config.json", "configuration_vit_scratch.py", "modeling_vit_scratch.py"}
            assert expected <= set(files), (repo, message)
            strange = {path for path in files if path.startswith(("checkpoint-", "_", "last/", "best/"))}
            assert not strange, (repo, message)


def test_checkpoint_is_in_the_repository_and_whole(pushed):
    _, _, files = pushed[0]["tester/checkpoint"][-1]

    names = {path.removeprefix("last-checkpoint/") for path in files if path.startswith("last-checkpoint/")}
    assert names >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
    assert json.loads(files["last-checkpoint/trainer_state.json"])["global_step"] == 5


def test_every_card_is_valid_and_has_no_blanks(pushed):
    for repo, commits in pushed[0].items():
        for _, message, files in commits:
            if repo not in RUNS:
                continue
            text = files["README.md"].decode()
            card = ModelCard(text)
            assert card.data.library_name == "transformers", (repo, message)
            assert "more information needed" not in text.lower(), (repo, message)
            assert "fine-tuned from" not in text.lower(), (repo, message)


def test_card_of_a_finished_run_shows_what_was_measured(pushed):
    commits, folder, _ = pushed
    text = commits["tester/every_save"][-1][2]["README.md"].decode()

    card = ModelCard(text)

    (result,) = card.data.eval_results
    accuracy = json.loads((folder / "every_save" / "metrics.json").read_text())["test_accuracy"]
    assert result.metric_value == round(accuracy, 6)
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "image-classification")
    assert card.data.model_name == "every_save"
    pictures = {"curves.png", "confusion_matrix.png"}
    assert pictures <= set(commits["tester/every_save"][-1][2])


def test_card_while_training_says_that_the_weights_are_not_the_last(pushed):
    _, _, files = pushed[0]["tester/every_save"][0]

    assert "Its training goes on: these weights are not the last ones." in files["README.md"].decode()


def test_every_commit_loads_without_the_package(pushed, loaded):
    commits = [(repo, oid, set(files)) for repo, found in pushed[0].items() for oid, _, files in found]
    ids = {f"{repo}@{oid}" for repo, oid, files in commits if files >= MODEL}

    assert set(loaded) - {"saved again"} == ids
    assert {loaded[oid]["model"] for oid in ids} == {"ViTScratchModel"}
    assert all(loaded[oid]["backbone"] in ([16], [192]) for oid in ids)


@pytest.mark.parametrize("repo", [*STRATEGIES, "model", "uploaded"])
def test_without_the_package_the_predictions_are_the_same(pushed, loaded, photograph, repo):
    commits, folder, _ = pushed
    local = str(folder / (repo if repo in STRATEGIES else "end"))
    last = f"tester/{repo}@{commits[f'tester/{repo}'][-1][0]}"

    scores = pipeline("image-classification", model=local, top_k=10)(photograph)
    features = pipeline("image-feature-extraction", model=local, pool=True)(photograph)

    assert len({entry["score"] for entry in scores}) == 10
    assert loaded[last]["scores"] == scores
    assert loaded[last]["features"] == features


def test_model_that_was_loaded_without_the_package_is_saved_with_its_code(pushed, loaded):
    commits, _, _ = pushed
    last = f"tester/end@{commits['tester/end'][-1][0]}"

    assert loaded["saved again"]["scores"] == loaded[last]["scores"]
    assert loaded["saved again"]["auto_map"] == AUTO_MAP


def test_without_the_package_the_painted_pixels_are_the_same(pushed, loaded):
    commits, folder, _ = pushed
    model = AutoModelForMaskedImageModeling.from_pretrained(folder / "encoder")
    with torch.no_grad():
        painted = model(torch.linspace(-1, 1, 192).view(1, 3, 8, 8), torch.arange(16)[None] % 2 == 0).reconstruction

    for repo in ("tester/encoder", "tester/saved"):
        last = f"{repo}@{commits[repo][-1][0]}"
        assert np.array_equal(np.array(loaded[last]["painted"], dtype=np.float32), painted.numpy()), repo
