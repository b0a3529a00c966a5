"""The documentation: its code runs, its site is built without a warning, its sentences are short."""

import re
import shlex
import shutil
import statistics
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from test_train_script import SMALL, train
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import vit_scratch
from hf_vit_scratch.conversion import export_proof
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.training import sanity_check
from hf_vit_scratch.training.recipe import RECIPES, parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Other tests run these: installation, the Hub, the explorer, the walkthrough, several processes, tools.
ELSEWHERE = re.compile(
    r"pip |python3? -m (pip|venv)|hf |vit-scratch explore |vit-scratch train --push_to_hub |python walkthrough/|"
    r"accelerate |RELIABILITY="
)
LAUNCHED = re.compile(r"accelerate launch .*?(?:-m vit_scratch train|train\.py)(.*)")
HUB = ("uoft-cs/cifar10", "ILSVRC/imagenet-1k")  # data sets that pages name
SIZES = ["--hidden_size=32", "--num_hidden_layers=2", "--num_attention_heads=2", "--intermediate_size=64"]
TRAINED: set[tuple[str, ...]] = set()
SHORT = ["--max_train_minutes=0.02", "--logging_steps=1", "--speed_choice=plain", "--use_cpu=true"]


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """The folders and files that the documentation speaks of."""
    folder = tmp_path_factory.mktemp("things")
    for name, pixels in zip(("cat", "dog"), load_sample_images().images, strict=True):
        for place in ("my_photos", "new_photos"):
            (folder / place / name).mkdir(parents=True)
        for number in range(12):
            part = Image.fromarray(pixels).crop((40 * number, 20 * number, 40 * number + 120, 20 * number + 90))
            part.save(folder / ("new_photos" if number > 8 else "my_photos") / name / f"{number}.jpg")
    (folder / "photos").mkdir()
    for path in folder.glob("my_photos/*/*.jpg"):
        shutil.copy(path, folder / "photos" / f"{path.parent.name}_{path.name}")
    shutil.copytree(folder / "my_photos" / "dog", folder / "more")
    names = sorted(path.name for path in (folder / "photos").iterdir())
    tags = [f"{name},{n % 2},{n % 3 == 0:d},{n > 4:d}" for n, name in enumerate(names)]
    (folder / "photos" / "tags.csv").write_text("\n".join(["file_name,indoor,people,night", *tags]))
    ages = [f"{name},{10 + n}.0" for n, name in enumerate(names)]
    (folder / "photos" / "ages.csv").write_text("\n".join(["file_name,age", *ages]))
    load_digits()["test"][0]["image"].convert("RGB").save(folder / "a_digit.png")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vit = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes))
    vit.save_pretrained(folder / "vit_folder")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit_folder")
    short = ["--max_steps", "5", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    train.main([*SMALL, *short, "--output_dir", str(folder / "runs" / "digits")])
    train.main(
        [
            "your_images",
            *SHORT,
            *SIZES,
            "--data",
            str(folder / "my_photos"),
            "--output_dir",
            str(folder / "runs/my_photos"),
        ]
    )
    return folder


@pytest.fixture
def here(things, tmp_path, monkeypatch):
    """Goes to a folder with a copy of these things, and lets commands that measure do it briefly."""
    monkeypatch.chdir(shutil.copytree(things, tmp_path / "here"))
    for name, seconds in (("SECONDS", 0.05), ("TRIAL_SECONDS", 0.2), ("MAX_STEPS", 2)):
        monkeypatch.setattr(sanity_check, name, seconds)
    monkeypatch.setattr(export_proof, "SECONDS", 0.0)


def run_command(command):
    """Run a line of a block; a training run is short."""
    program, *argv = shlex.split(command.replace(" FOLDER", " vit_folder"), comments=True)
    if program == "vit-scratch" and argv[0] == "train":
        args, _ = parse_recipe(argv[1:])
        if args.data.data != "digits" and not Path(args.data.data).exists():
            assert args.data.data in HUB, command
            return
        if (given := tuple(argv)) in TRAINED:  # by another page; `things` has what it leaves
            return
        TRAINED.add(given)
        shutil.rmtree(args.training.output_dir, ignore_errors=True)
        sizes = SIZES if args.model.model is None else []  # a trained model has its own
        assert vit_scratch.main([*argv, *SHORT, *sizes]) == 0
    elif program == "vit-scratch":
        for flag in ("--output_dir", "--output"):
            if flag in argv:
                path = Path(argv[argv.index(flag) + 1])
                shutil.rmtree(path, ignore_errors=True)
        assert vit_scratch.main(argv) == 0
    else:
        assert program == "python", command
        command = command.replace("python", shlex.quote(sys.executable), 1)
        subprocess.run(command, shell=True, check=True, capture_output=True)  # the shell expands photos/*.jpg


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8")) and page.stem != "tools"],
    ids=lambda page: page.stem,
)
def test_every_block_of_code_runs(page, here):
    names = {}
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python" and "YOUR_NAME" not in code:
            exec(compile(code, str(page), "exec"), names)
        elif language == "bash":
            for command in filter(None, map(str.strip, code.splitlines())):
                if launched := LAUNCHED.match(command):
                    parse_recipe(shlex.split(launched[1], comments=True))
                elif not ELSEWHERE.match(command):
                    run_command(command)


def sentences(text):
    """The sentences of a page, without code, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|<|!\[)", line)]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    plain = [re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())) for paragraph in paragraphs]
    return [sentence for paragraph in plain for sentence in re.split(r"(?<=[.?!:]) ", paragraph) if len(sentence) > 2]


def test_readme_fits_on_a_few_screens_in_short_sentences():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    found = sentences(text)
    assert len(found) > 30
    assert statistics.mean(len(sentence.split()) for sentence in found) < 18
    assert [sentence for sentence in found if sentence.count("(") > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"(?:\]\(|src(?:set)?=\")(?!https?:)([^)#\s\"]*)#?([^)\s\"]*)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, (target, anchor)


def test_readme_has_the_figures_of_the_recipes():
    rows = re.findall(r"^\| `(\w+)`.* (\d+\.\d%) \(.*seeds?\)", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 5
    for name, figure in rows:
        assert f"test accuracy {figure}" in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), name


@pytest.mark.slow
def test_readme_names_what_a_run_leaves(things):
    _, section = PAGES[0].read_text(encoding="utf-8").split("## What a run leaves")
    named = re.findall(r"`([^`]+)`", section.partition("## ")[0])
    named += ["preprocessor_config.json", "*_vit_scratch.py"]  # the image processor and the code
    for path in (things / "runs" / "my_photos").iterdir():
        assert any(fnmatch(path.name, name) for name in named), path


@pytest.mark.slow
def test_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    flags = (tmp_path / "site" / "docs" / "reference" / "flags.html").read_text()
    assert "--near_duplicates" in flags
    assert 'script src="http' not in flags


def test_site_has_all_pages():
    listed = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT / "docs")).removesuffix(".md")
        assert name == "index" or re.search(rf"^{name}$", listed, re.MULTILINE), name
