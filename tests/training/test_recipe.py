from dataclasses import fields

import pytest
import yaml

from hf_vit_scratch import ViTScratchConfig
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.arguments import ModelArguments, ViTTrainingArguments
from hf_vit_scratch.training.checkpointing import finish_checkpoint
from hf_vit_scratch.training.recipe import FACTS, RECIPES, Recipe, model_config, parse_recipe
from hf_vit_scratch.training.run_directory import resolve_checkpoint, without_resuming


@pytest.fixture
def parse(tmp_path):
    def parse(recipe: str, *argv: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe)
        return parse_recipe([str(path), *argv])

    return parse


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(parse):
    (*_, training), _ = parse("weight_decay: 0.3\nwarmup_steps: 7", "--weight_decay", "0.1", "--output_dir", "x")

    assert (training.weight_decay, training.warmup_steps, training.lr_scheduler_type) == (0.1, 7, "cosine")


def test_recipe_for_a_cpu_leaves_precision_and_attention_to_the_machine():
    recipe = yaml.safe_load((RECIPES / "cifar10_cpu.yaml").read_text())
    assert not {"bf16", "fp16", "attn_implementation"} & set(recipe)  # products in bf16: 28 times slower on a Zen 3


def test_secret_is_not_taken_as_a_flag(parse):
    with pytest.raises(UserError, match=r"hub_token must stay none: it would be published .* use `hf auth login`"):
        parse("seed: 1", "--hub_token", "hf_secret", "--output_dir", "x")


def test_number_in_scientific_notation_is_a_number(parse):
    (*_, training), _ = parse("learning_rate: 1e-3")  # a string in YAML 1.1

    assert training.learning_rate == 0.001


def test_values_of_every_kind_arrive_with_their_type(parse):
    recipe = """
image_size: [32, 64]
norm_first: true
qkv_bias: false
position_embedding_type: rope2d
classifier_hidden_size: null
translate: 0.25
load_best_model_at_end: false
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 1e-5, decay_type: linear}
eval_strategy: no
"""
    (model, _, augmentation, _, training), _ = parse(recipe, "--patch_size", "8")

    assert (model.image_size, model.patch_size, model.norm_first, model.qkv_bias) == ([32, 64], [8], True, False)
    assert (model.position_embedding_type, model.classifier_hidden_size) == ("rope2d", None)
    assert augmentation.translate == 0.25
    assert (training.load_best_model_at_end, training.lr_scheduler_kwargs) == (
        False,
        {"min_lr": 1e-5, "decay_type": "linear"},
    )
    assert training.eval_strategy == "no"  # not the False of YAML 1.1


def test_resolved_recipe_holds_what_was_given_and_reproduces_it(parse, tmp_path):
    argv = (
        "--resume_from_checkpoint",
        "x",
        "--learning_rate",
        "2e-3",
        "--no_load_best_model_at_end",
        "--per-device-train-batch-size=16",
    )
    first, resolved = parse("learning_rate: 1e-3\nimage_size: 32\nbf16: false\nlr_scheduler_type: linear", *argv)

    resolved.save(tmp_path, "train.py")
    again, resolved_again = parse((tmp_path / "recipe.yaml").read_text())

    assert resolved.values() == {
        "learning_rate": 0.002, "image_size": [32], "bf16": False, "lr_scheduler_type": "linear",
        "load_best_model_at_end": False, "per_device_train_batch_size": 16,
    }  # fmt: skip
    assert resolved_again.values() == resolved.values()
    assert [vars(arguments) for arguments in again[:3]] == [vars(arguments) for arguments in first[:3]]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["cifar10_cpu", "--learning_rate", "1e-3"], "muon_learning_rate"),
        (["your_images", "--lr_scheduler_type", "cosine"], "lr_scheduler_kwargs"),
        (["your_images", "--qk_norm", "true"], "local_attention"),
        (["your_images", "--qkv_bias", "false"], "local_attention"),
        (["your_images", "--position_embedding_type", "learned"], "local_attention"),
    ],
)
def test_flag_replaces_what_the_recipe_sets_beside_it(argv, name):
    arguments, recipe = parse_recipe(argv)

    assert recipe.left_out == [name]
    assert name not in recipe.values()
    assert not getattr(arguments.training, name)


@pytest.mark.parametrize(("value", "left_out"), [("warmup_stable_decay", []), ("null", ["lr_scheduler_kwargs"])])
def test_only_a_flag_that_changes_a_recipe_replaces_what_is_beside_it(value, left_out):
    _, recipe = parse_recipe(["your_images", "--lr_scheduler_type", value, "--model", "null"])

    assert recipe.left_out == left_out
    assert "model" not in recipe.settings


def test_flag_at_its_default_replaces_nothing():
    _, recipe = parse_recipe(["your_images", "--qk_norm", "false", "--qkv_bias", "true"])

    assert recipe.left_out == []


def test_muon_takes_its_settings_with_it():
    _, recipe = parse_recipe(["your_images", "--muon", "false"])

    assert recipe.left_out == ["muon_learning_rate", "muon_beta2"]


def test_flags_that_belong_together_can_be_given_together():
    (*_, training), recipe = parse_recipe(["cifar10_cpu", "--learning_rate", "1e-3", "--muon_learning_rate", "2e-3"])

    assert (training.learning_rate, training.muon_learning_rate, recipe.left_out) == (1e-3, 2e-3, [])


def test_size_of_a_flag_wins_over_the_sizes_of_a_recipe():
    (model, *_), _ = parse_recipe(["cifar10_cpu", "--model", "S/8"])
    config = model_config(model, ["a", "b"])

    sizes = (config.image_size, config.patch_size, config.hidden_size, config.num_hidden_layers)
    assert sizes == (32, 8, 384, 12)
    assert config.position_embedding_type == "rope2d"  # what is no size stays the recipe's


@pytest.mark.parametrize("null", [["--ema_decay", "null"], ["--ema_decay=null"], ["--ema-decay=null"]], ids=str)
def test_null_undoes_what_a_recipe_sets(null, parse, tmp_path):
    (*_, training), recipe = parse("ema_decay: 0.5\nweight_decay: 0.3", *null, "--output_dir", "x")
    recipe.save(tmp_path, "train.py")
    (*_, again), _ = parse((tmp_path / "recipe.yaml").read_text())

    assert (training.ema_decay, training.weight_decay) == (None, 0.3)
    assert recipe.settings["ema_decay"].origin == "flag"  # so that nothing else is chosen
    assert (again.ema_decay, again.weight_decay) == (None, 0.3)


def test_tilde_is_a_text_that_the_saved_recipe_keeps(parse, tmp_path):
    *_, recipe = parse("seed: 1", "--label_separator", "~")
    recipe.save(tmp_path, "train.py")

    assert parse_recipe([str(tmp_path / "recipe.yaml")])[0].data.label_separator == "~"


def test_null_of_an_unknown_flag_is_refused(parse):
    with pytest.raises(UserError, match=r"the command line: unknown flag 'ema_deca'\. Did you mean ema_decay\?"):
        parse("seed: 1", "--ema_deca", "null")


def test_run_without_a_limit_can_be_repeated(parse, tmp_path):
    (*_, training), recipe = parse("max_train_minutes: 9", "--max_train_minutes", "inf")
    recipe.save(tmp_path, "train.py")
    (*_, again), _ = parse((tmp_path / "recipe.yaml").read_text())

    assert training.max_train_minutes == again.max_train_minutes == float("inf")


def test_recipe_without_its_limit_keeps_a_schedule_in_parts_of_the_time(parse):
    schedule = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 0.5}"
    null, other = "--max_train_minutes=null", ["--lr_scheduler_type", "linear"]
    recipes = [f"max_train_minutes: 9\n{schedule}", schedule, "max_train_minutes: 9"]

    limits = [parse(recipe, null)[0].training.max_train_minutes for recipe in recipes]

    assert limits == [float("inf"), None, None]
    assert parse(recipes[0], null, *other)[0].training.max_train_minutes is None


def test_digits_are_the_recipe_if_none_is_named():
    (model, data, *_, training), _ = parse_recipe(["--num_hidden_layers", "3"])

    assert (data.data, model.num_hidden_layers, training.output_dir) == ("digits", 3, "runs/digits")


def test_recipe_of_the_package_is_found_by_its_name():
    (*_, training), _ = parse_recipe(["cifar10_cpu"])

    assert training.output_dir == "runs/cifar10_cpu"


def test_data_without_a_recipe_is_refused():
    with pytest.raises(UserError, match=r"--data needs a recipe before it"):
        parse_recipe(["--data", "photos"])


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ("learning_rat: 1", [], r"recipe\.yaml: unknown flag 'learning_rat'\. Did you mean learning_rate\?"),
        ("xyzzy: 1", [], r"recipe\.yaml: unknown flag 'xyzzy'\. Run vit-scratch train --help for the flags"),
        ("1: 1", [], r"recipe\.yaml: unknown flag '1'\."),
        ("help: []", [], r"recipe\.yaml: unknown flag 'help'\."),
        ("weight-decay: 1", [], r"recipe\.yaml: unknown flag 'weight-decay'\. Did you mean weight_decay\?"),
        ("learning_rate: fast", [], r"argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        ("- a\n- b", [], r"recipe\.yaml: a recipe must be lines of `key: value`, got list"),
        ("", [], r"a recipe must be lines of `key: value`, got (NoneType|str)"),
        ("a: [", [], r"recipe\.yaml: the recipe cannot be read as YAML: .*expected the node content"),
        (
            "seed: 1",
            ["--learning_rat", "1"],
            r"the command line: unknown flag 'learning_rat'\. Did you mean learning_rate\?",
        ),
        ("seed: 1", ["--num_train_epochs", "many"], r"argument --num_train_epochs.*invalid float value: 'many'"),
        ("seed: 1", ["--warmup_ratio", "0.1"], r"unknown flag 'warmup_ratio'\. Did you mean warmup_steps\?"),
        ("seed: 1", ["--epochs", "9"], r"unknown flag 'epochs'\. Did you mean num_train_epochs\?"),
        (
            "seed: 1",
            ["--batch-size", "9"],
            r"Did you mean per_device_train_batch_size or auto_find_batch_size or per_device_eval_batch_size\?",
        ),
        (
            "seed: 1",
            ["stray"],
            r"the command line: unexpected 'stray'\. A recipe comes first, flags begin with --, and",
        ),
        (
            "seed: 1",
            ["--lr_scheduler_type", "cosin"],
            r"cosin is not a valid SchedulerType, please select one of \['linear', 'cosine'",
        ),
        (
            "eval_strategy: steps\nsave_strategy: epoch",
            [],
            r"load_best_model_at_end requires the save and eval strategy",
        ),
    ],
)
def test_mistake_is_named_in_one_line(parse, recipe, argv, message):
    with pytest.raises(UserError, match=message) as error:
        parse(recipe, *argv)
    assert "\n" not in str(error.value)


def test_recipe_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"cifar is neither a recipe nor a YAML file\. Recipes: .*digits, .*\."):
        parse_recipe(["cifar"])


@pytest.mark.parametrize(
    ("name", "message"), [("seed: ", r"argument --seed: invalid int value"), ("", r"must be lines of")]
)
def test_recipe_cannot_run_code(parse, name, message, tmp_path):
    with pytest.raises(UserError, match=message):
        parse(f"{name}!!python/object/apply:os.mkdir ['{tmp_path}/made']")
    assert not (tmp_path / "made").exists()


def test_model_flags_are_fields_of_the_configuration():
    ours = {field.name for field in fields(ViTScratchConfig)} - {"image_size"}
    flags = {field.name for field in fields(ModelArguments)} - {"model", "attn_implementation", "image_size"}

    own = {name for name in ViTScratchConfig.__annotations__} - {"image_size"}
    assert flags <= ours
    assert own - flags == {  # RGB only; no recipe is causal; the labels tell their mean
        "num_channels", "is_causal", "label_mean", "label_scale", "temperature",
    }  # fmt: skip


def test_model_of_numbers_may_be_the_start_of_one_of_classes():
    start = ViTScratchConfig(num_labels=1, problem_type="regression", label_mean=[1.0], label_scale=[2.0])

    config = model_config(ModelArguments(model="runs/ages"), ["a", "b", "c"], start)

    assert (config.num_labels, config.problem_type, config.label_scale) == (3, None, None)


def test_model_flags_make_a_configuration():
    args = ModelArguments(model="Ti/4", image_size=[32], hidden_size=96, norm_first=True)

    config = model_config(args, ["cat", "dog", "cow"])

    assert (config.image_size, config.patch_size, config.hidden_size, config.norm_first) == (32, 4, 96, True)
    assert config.label2id == {"cat": 0, "dog": 1, "cow": 2}


def test_impossible_model_is_a_users_mistake():
    with pytest.raises(UserError, match=r"image_size \(height 32\) must be divisible by patch_size \(height 5\)"):
        model_config(ModelArguments(image_size=[32], patch_size=[5]), ["cat", "dog"])


def make_checkpoint(run_dir, step):
    """A complete checkpoint, without a model."""
    checkpoint = run_dir / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in ("trainer_state.json", "scheduler.pt"):
        (checkpoint / name).write_text("{}")
    finish_checkpoint(checkpoint, best=None, limit=None)
    return checkpoint


def test_checkpoint_without_the_choices_of_its_run_is_refused_where_they_matter(parse, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "downloaded", 1)
    flags = "--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", str(checkpoint)
    args, recipe = parse("fit_to_images: true", *flags)
    with pytest.raises(UserError, match=r"downloaded has no _run\.json, so what was chosen for its images is not"):
        resolve_checkpoint(args.training, recipe)
    args, recipe = parse("seed: 1", *flags)
    assert resolve_checkpoint(args.training, recipe) == checkpoint


def test_another_number_of_processes_is_refused(parse, tmp_path):
    make_checkpoint(tmp_path / "run", 1)
    args, recipe = parse("seed: 1", "--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", "true")
    recipe.processes = 2
    recipe.save(tmp_path / "run", "train.py")
    with pytest.raises(UserError, match=r"belongs to a run of 2 processes, got 1: .*Start 2 processes\."):
        resolve_checkpoint(args.training, recipe)


def test_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")

    with pytest.raises(UserError, match=r"is not empty, and a run is never overwritten\. Continue it with"):
        resolve_checkpoint(ViTTrainingArguments(output_dir=str(tmp_path)), Recipe())


def test_checkpoints_of_another_trainer_are_not_taken_for_unfinished_ones(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()  # the stock Trainer writes no checksums
    args = ViTTrainingArguments(output_dir=str(tmp_path))

    with pytest.raises(UserError, match=r"is not empty, and a run is never overwritten"):
        resolve_checkpoint(args, Recipe())
    (tmp_path / "recipe.yaml").write_text("# python train.py")
    assert resolve_checkpoint(args, Recipe()) is None


def test_run_without_a_checkpoint_is_begun_again(tmp_path):
    for name in ("_lock", "_run.json", "_samples.png", "_near_duplicates.csv", "_splits.csv", "recipe.yaml"):
        (tmp_path / name).write_text("{}")

    assert resolve_checkpoint(ViTTrainingArguments(output_dir=str(tmp_path)), Recipe()) is None


def test_new_or_empty_folder_starts_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        assert resolve_checkpoint(ViTTrainingArguments(output_dir=str(folder)), Recipe()) is None


def test_run_that_is_not_resumed_is_a_new_one(tmp_path):
    args = ViTTrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint="false")
    assert resolve_checkpoint(args, Recipe()) is None
    assert args.resume_from_checkpoint is None  # by which choices tell


def test_resume_takes_the_newest_checkpoint(tmp_path):
    for step in (9, 10, 11):
        checkpoint = make_checkpoint(tmp_path, step)
        if step == 11:  # it was cut off while it was being saved
            (checkpoint / "SHA256SUMS").unlink()
    args = ViTTrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint="true")

    assert resolve_checkpoint(args, Recipe()) == tmp_path / "checkpoint-10"


def test_checkpoint_of_another_run_does_not_continue_into_this_ones_folder(tmp_path):
    for run in ("a", "b"):
        make_checkpoint(tmp_path / run, 9)
    theirs, ours, new = tmp_path / "b" / "checkpoint-9", str(tmp_path / "a"), str(tmp_path / "new")

    with pytest.raises(UserError, match=r"a is not empty, and a run is never overwritten"):
        resolve_checkpoint(ViTTrainingArguments(output_dir=ours, resume_from_checkpoint=str(theirs)), Recipe())
    args = ViTTrainingArguments(output_dir=new, resume_from_checkpoint=str(theirs))
    assert resolve_checkpoint(args, Recipe()) == theirs


@pytest.mark.parametrize("folder", [".", "new"])
def test_resume_without_a_checkpoint_is_refused(tmp_path, folder):
    args = ViTTrainingArguments(output_dir=str(tmp_path / folder), resume_from_checkpoint="true")

    with pytest.raises(
        UserError, match=r"holds no complete checkpoint to resume from\. Start without --resume_from_checkpoint"
    ):
        resolve_checkpoint(args, Recipe())


def test_damaged_facts_of_a_run_are_the_users_mistake(tmp_path):
    (tmp_path / FACTS).write_text("{")

    with pytest.raises(UserError, match=rf"{FACTS} is damaged"):
        Recipe.load(tmp_path)


def test_resume_from_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    args = ViTTrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint=str(tmp_path))

    with pytest.raises(UserError, match=r"is not a checkpoint: it holds no trainer_state\.json"):
        resolve_checkpoint(args, Recipe())


@pytest.mark.parametrize(
    "resuming", [[], ["--resume_from_checkpoint", "true"], ["--resume-from-checkpoint=runs/a/checkpoint-3"]], ids=str
)
def test_command_that_a_run_begins_with_does_not_resume(resuming):
    assert without_resuming(["a.yaml", *resuming, "--seed", "1"]) == ["a.yaml", "--seed", "1"]


@pytest.mark.parametrize(
    ("is_terminal", "given", "disabled"),
    [(True, [], False), (False, [], True), (False, ["--disable_tqdm", "false"], False)],
)
def test_progress_bars_are_for_terminals(is_terminal, given, disabled, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert parse_recipe(given)[0].training.disable_tqdm is disabled


def test_number_of_workers_of_a_stream_is_part_of_the_run(tmp_path):
    make_checkpoint(tmp_path, 3)
    settings = {"streaming": True, "max_steps": 9}
    begun, now = Recipe(), Recipe()
    begun.add(settings | {"dataloader_num_workers": 2}, "flag")
    now.add(settings | {"dataloader_num_workers": 1}, "flag")
    begun.save(tmp_path, "the command")
    args = ViTTrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint="true")

    with pytest.raises(UserError, match=r"another recipe: dataloader_num_workers 1 \(was 2\)"):
        resolve_checkpoint(args, now)
    for recipe in (begun, now):
        del recipe.settings["streaming"]
    begun.save(tmp_path, "the command")
    assert resolve_checkpoint(args, now) is not None
