"""What is chosen by the images, the device and the measured speed."""

import math
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from datasets import Dataset, Features
from PIL import Image
from test_train_script import train

from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchLayer
from hf_vit_scratch.speed import optimize
from hf_vit_scratch.training import auto_config
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.recipe import model_config, parse_recipe

YOUR_IMAGES = "your_images"


def rows_of(sizes):
    """Rows with a grey image of each (width, height)."""
    different = list(dict.fromkeys(sizes))
    rows = Dataset.from_dict(
        {"image": [Image.new("RGB", size) for size in different]}, features=Features({"image": datasets.Image()})
    )
    return rows.select([different.index(size) for size in sizes])


def fitted(sizes, *flags):
    """The values of all arguments after the sizes were chosen, by name, and the choices as text."""
    args, recipe = parse_recipe([YOUR_IMAGES, *flags])
    auto_config.fit_sizes(args, rows_of(sizes), recipe)
    return {name: value for part in args for name, value in vars(part).items()}, recipe.choices()


def length(number, speed, monkeypatch, *flags):
    """The values of all arguments after the length was chosen, for so many images and images per second."""
    monkeypatch.setattr(auto_config, "measure_speed", lambda *_: speed)
    args, recipe = parse_recipe([YOUR_IMAGES, *flags])
    config = model_config(args.model, ["a", "b"])
    auto_config.fit_length(args, config, number, recipe)
    return {name: value for part in args for name, value in vars(part).items()}, recipe.choices()


def test_broken_image_is_no_hindrance_to_the_choice(class_folders):
    for file in class_folders.glob("*/*.jpg"):
        file.write_bytes(file.read_bytes()[:-100])  # named when it is read
    args, recipe = parse_recipe([YOUR_IMAGES])
    auto_config.fit_sizes(args, load_splits(str(class_folders), near_duplicates="ignore")["train"], recipe)
    assert recipe.choices()[0].startswith("image_size 64: half of the images are 64 pixels or less")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("side", [20, 33, 64, 100, 223, 500])
def test_chosen_size_enlarges_no_image_and_is_cut_into_whole_patches(side, device, monkeypatch):
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device(device))
    monkeypatch.setattr(ViTTrainingArguments, "world_size", 1)

    chosen, _ = fitted([(side, side + 9), (side + 50, side), (side, side)])

    (image_size,), (patch_size,) = chosen["image_size"], chosen["patch_size"]
    assert image_size <= max(side, 32)
    assert image_size % patch_size == 0
    assert image_size // patch_size == (8 if device == "cpu" or image_size <= 64 else 16)
    first = set(chosen["initial_image_size"])
    assert all(0 < length < image_size and length % patch_size == 0 for length in first)


def test_large_photographs_get_a_large_image_on_a_gpu_and_a_small_one_on_a_cpu(monkeypatch):
    photographs = [(640, 480), (3000, 4000), (800, 600)]

    on_cpu, lines = fitted(photographs)
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device("cuda"))
    monkeypatch.setattr(ViTTrainingArguments, "world_size", 1)
    on_gpu, _ = fitted(photographs)

    assert (on_cpu["image_size"], on_gpu["image_size"]) == ([64], [224])
    assert lines[0] == (
        "image_size 64: half of the images are 600 pixels or less on their shorter side, and a CPU is slow beyond 64"
    )


@pytest.mark.parametrize(
    ("flags", "size"), [(["--model", "B/32"], 32), (["--model", "H/14"], 42), (["--patch_size", "5"], 45)], ids=str
)
def test_image_is_cut_into_the_patches_that_are_asked_for(flags, size):
    assert fitted([(50, 50)], *flags)[0]["image_size"] == [size]


def test_null_of_a_size_leaves_the_choice():
    chosen, lines = fitted([(50, 50)], "--image_size", "null", "--hidden_size=null")
    assert (chosen["image_size"], chosen["hidden_size"]) == ([48], 128)
    assert lines[0].startswith("image_size 48")


@pytest.mark.parametrize(("processes", "batch"), [(1, 128), (4, 32), (8, 16)])
def test_few_images_are_shared_by_the_processes(processes, batch, monkeypatch):
    monkeypatch.setattr(ViTTrainingArguments, "world_size", processes)
    assert fitted([(32, 32)] * 500)[0]["per_device_train_batch_size"] == batch


def test_few_images_come_in_smaller_batches():
    assert fitted([(32, 32)] * 16)[0]["per_device_train_batch_size"] == 16
    assert fitted([(32, 32)] * 100)[0]["per_device_train_batch_size"] == 32
    assert fitted([(32, 32)] * 3_000)[0]["per_device_train_batch_size"] == 128


@pytest.mark.parametrize(
    ("number", "flags", "dropped"),
    [
        (3_000, [], True),  # 23 batches of 128, and 56 images
        (3_010, [], False),  # and 66 images
        (256, [], False),
        (7, [], False),  # less than a batch
        (40, ["--per_device_train_batch_size", "128"], False),
        (130, ["--per_device_train_batch_size", "128"], True),
        (3_000, ["--dataloader_drop_last", "false"], False),
    ],
)
def test_last_batch_is_left_out_where_it_is_less_than_half_a_batch(number, flags, dropped):
    assert fitted([(32, 32)] * number, *flags)[0]["dataloader_drop_last"] == dropped


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_speed_is_measured_in_the_precision_of_training(precision, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setattr(auto_config, "SECONDS", 0.0)
    sizes = ["--image_size", "8", "--patch_size", "8", "--hidden_size", "48", "--num_hidden_layers", "1"]
    args, _ = parse_recipe([YOUR_IMAGES, *sizes, "--speed_choice", "plain"])
    asked, autocast = [], torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda *given, **options: asked.append(given[1]) or autocast(*given, **options)
    )

    auto_config.measure_speed(model_config(args.model, ["a", "b"]), args)

    assert asked[0] == {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def test_images_of_one_small_size_are_shifted():
    alike, _ = fitted([(32, 32)] * 50)
    mixed, _ = fitted([(32, 32)] * 50 + [(48, 32)])

    assert (alike["crop_padding"], mixed["crop_padding"]) == (4, 0)


@pytest.mark.parametrize(
    ("passes", "flags", "least_share"),
    [(20, [], 0.6), (39, [], 0.6), (40, [], 0.35), (20, ["--crop_padding", "4"], None)],
)
def test_images_that_are_not_shifted_are_cropped_the_more_the_more_often_they_are_seen(
    passes, flags, least_share, monkeypatch
):
    chosen, _ = length(1000, 1000.0, monkeypatch, "--num_train_epochs", str(passes), *flags)

    assert chosen["random_resized_crop_scale"] == least_share


@pytest.mark.parametrize(
    ("flags", "mixed", "policy"),
    [
        (["--num_train_epochs", "20"], False, "none"),
        (["--num_train_epochs", "70"], True, "none"),
        (["--num_train_epochs", "149"], True, "none"),
        (["--max_steps", "100"], False, "none"),  # of 128 images: 6 passes
        (["--num_train_epochs", "500"], True, "trivialaugment"),
        (["--num_train_epochs", "500", "--max_train_minutes", "0.1"], False, "none"),
    ],
)
def test_regularization_grows_with_the_passes_that_will_be_made(flags, mixed, policy, monkeypatch):
    chosen, lines = length(2_000, 10_000.0, monkeypatch, "--per_device_train_batch_size", "128", *flags)

    assert (chosen["mixup_alpha"] > 0, chosen["cutmix_alpha"] > 0) == (mixed, mixed)
    assert chosen["auto_augment"] == policy
    assert [name in "".join(lines) for name in ("mixup_prob", "mixing_start_fraction")] == [mixed, mixed]
    assert ("policy_start_fraction" in "".join(lines)) == (policy != "none")


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        ([], (0.125, 0.5)),
        (["--policy_start_fraction", "0.2"], (0.125, 0.2)),
        (["--mixing_start_fraction", "0"], (0, 0.5)),
    ],
)
def test_mixing_and_policy_begin_later_unless_their_start_is_set(flags, starts, monkeypatch):
    chosen, _ = length(2_000, 1e6, monkeypatch, "--num_train_epochs", "300", *flags)

    assert (chosen["mixing_start_fraction"], chosen["policy_start_fraction"]) == starts
    assert (chosen["mixup_alpha"], chosen["cutmix_alpha"], chosen["auto_augment"]) == (0.8, 1.0, "trivialaugment")


@pytest.mark.parametrize(
    ("flag", "value", "start"),
    [("--auto_augment", "randaugment", "policy_start_fraction"), ("--mixup_alpha", "0.8", "mixing_start_fraction")],
)
def test_start_from_the_first_pass_is_recorded_for_a_repeated_run(flag, value, start, monkeypatch):
    _, lines = length(2_000, 1e6, monkeypatch, "--num_train_epochs", "20", flag, value)

    assert f"{start} 0.0" in "".join(lines)


def test_what_is_turned_off_does_not_begin_later(monkeypatch):
    flags = ["--mixup_alpha", "0", "--cutmix_alpha", "0", "--auto_augment", "none", "--random_erasing_prob", "0.2"]
    chosen, _ = length(2_000, 1e6, monkeypatch, "--num_train_epochs", "300", *flags)
    assert (chosen["mixing_start_fraction"], chosen["policy_start_fraction"]) == (0, 0)


@pytest.mark.parametrize("flags", [["--initial_image_size", "null"], ["--initial_image_size_fraction", "0"]], ids=str)
def test_smaller_images_at_first_can_be_turned_off(flags):
    chosen, _ = fitted([(64, 64)], *flags)
    assert (chosen["initial_image_size"], chosen["initial_image_size_fraction"]) == (None, 0)


@pytest.mark.parametrize(("off", "other", "alpha"), [("cutmix", "mixup", 0.8), ("mixup", "cutmix", 1.0)])
def test_one_kind_of_mixing_can_be_turned_off(off, other, alpha, monkeypatch):
    chosen, _ = length(2_000, 1e6, monkeypatch, "--num_train_epochs", "300", f"--{off}_alpha", "0")
    assert (chosen[f"{off}_alpha"], chosen[f"{other}_alpha"]) == (0, alpha)


@pytest.mark.parametrize(("number", "epochs", "share"), [(2000, 20, 0.1), (2000, 93, 0.1), (450, 600, 0.0625)])
def test_last_tenth_but_150_steps_at_most_is_neither_changed_nor_mixed(number, epochs, share, monkeypatch):
    flags = ["--per_device_train_batch_size", "128", "--num_train_epochs", str(epochs)]
    chosen, lines = length(number, 1e6, monkeypatch, *flags)

    assert chosen["augmentation_off_fraction"] == share
    assert any(f"augmentation_off_fraction {share}" in line for line in lines)


def test_what_is_set_is_not_chosen():
    flags = ["--image_size", "48", "96", "--hidden_size", "64", "--random_resized_crop_scale", "0.9"]

    chosen, lines = fitted([(500, 400)] * 50, *flags)

    assert (chosen["image_size"], chosen["random_resized_crop_scale"]) == ([48, 96], 0.9)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert [chosen[name] for name in sizes] == [64, 4, 1, 256]  # what is left open fits to what is set
    assert 48 * 96 / chosen["patch_size"][0] ** 2 <= 64
    assert not any(name in line for line in lines for name in ("hidden_size 64", "crop_scale"))
    assert not any(line.startswith("image_size") for line in lines)


def test_first_size_is_cut_into_whole_patches_along_both_axes():
    chosen, _ = fitted([(500, 400)] * 50, "--image_size", "48", "64", "--patch_size", "6", "16")

    assert chosen["initial_image_size"] == [36, 48]


def test_model_that_is_named_keeps_its_sizes():
    chosen, _ = fitted([(500, 400)] * 50, "--model", "Ti/8")

    assert (chosen["patch_size"], chosen["hidden_size"], chosen["initial_image_size"]) == (None, None, None)


def test_passes_are_as_many_as_fit_into_the_time(monkeypatch):
    minutes = ["--max_train_minutes", "5"]

    chosen, lines = length(2_000, 400.0, monkeypatch, *minutes)

    possible = auto_config.TIME_FOR_STEPS * 400 * 300 / 2_000
    assert 1.4 * possible < chosen["num_train_epochs"] < 1.6 * possible  # the minutes end it, even if it gets faster
    assert "an upper limit; about 54 fit into the 5 minutes, after which the run ends; 300 would be best" in lines[0]
    assert length(2_000, 800.0, monkeypatch, *minutes)[0]["num_train_epochs"] > 1.9 * chosen["num_train_epochs"]


def test_images_that_a_pass_leaves_out_take_no_time(monkeypatch):
    flags = ["--max_train_minutes", "5", "--per_device_train_batch_size", "128", "--dataloader_drop_last"]

    (_, with_all), (_, without) = (length(575, 400.0, monkeypatch, *flags, drop) for drop in ("false", "true"))

    assert "about 188 fit into the 5 minutes" in with_all[0]  # 0.9 x 400 x 300 / 575
    assert "about 211 fit into the 5 minutes" in without[0]  # / 512
    assert any("of 939 steps" in line for line in with_all)  # five in a pass
    assert any("of 844 steps" in line for line in without)  # four


def test_passes_are_no_more_than_are_best(monkeypatch):
    chosen, _ = length(2_000, 1900.0, monkeypatch, "--max_train_minutes", "5")  # 257 passes fit

    assert chosen["num_train_epochs"] == 300


def test_fewer_images_are_seen_more_often_where_there_is_time(monkeypatch):
    few, many = (length(number, 1e6, monkeypatch)[0]["num_train_epochs"] for number in (500, 50_000))

    assert few > 4 * many


def test_run_without_a_limit_ends_within_twenty_minutes_and_says_so(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        chosen, _ = length(50_000, 100.0, monkeypatch)

    assert chosen["max_train_minutes"] == 20
    assert "Training will take about 20.0 minutes: about 2 passes over 50000 images, 90 a second" in caplog.text


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch):
    monkeypatch.setattr(auto_config, "can_compile", lambda device: True)

    assert length(2_000, 100.0, monkeypatch)[0]["torch_compile"]
    assert not length(2_000, 100.0, monkeypatch, "--max_train_minutes", "5")[0]["torch_compile"]
    assert not length(60, 1000.0, monkeypatch)[0]["torch_compile"]  # it ends long before its time
    assert length(60, 1000.0, monkeypatch, "--torch_compile_mode", "default")[0]["torch_compile"]  # which asks for it


def test_speed_is_measured_with_checkpointed_activations(monkeypatch):
    monkeypatch.setattr(auto_config, "SECONDS", 0.0)
    sizes = ["--image_size", "8", "--patch_size", "8", "--hidden_size", "48", "--num_hidden_layers", "1"]
    args, _ = parse_recipe([YOUR_IMAGES, *sizes, "--speed_choice", "plain", "--gradient_checkpointing", "true"])
    seen, call = [], ViTScratchLayer.__call__
    monkeypatch.setattr(
        ViTScratchLayer,
        "__call__",
        lambda self, *a, **k: seen.append(self.gradient_checkpointing) or call(self, *a, **k),
    )

    auto_config.measure_speed(model_config(args.model, ["a", "b"]), args)

    assert set(seen) == {True}


@pytest.mark.parametrize(
    ("batch", "advice"),
    [("16", "Start a new run .*_batch_size 8 --gradient_accumulation_steps 2. Or use"), ("1", "Use")],
)
def test_device_without_memory_for_the_measurement_says_what_to_change(
    batch, advice, class_folders, tmp_path, monkeypatch
):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(auto_config, "images_per_second", run_out)
    argv = [YOUR_IMAGES, "--data", str(class_folders), "--output_dir", str(tmp_path / "run"), "--use_cpu", "true",
            "--per_device_train_batch_size", batch]  # fmt: skip
    message = rf"ran out of memory with {batch} images per batch\. {advice} --gradient_checkpointing true"
    with pytest.raises(UserError, match=message):
        train.main(argv)


def measure_with_memory_for(images):
    def measure(config, args):
        if args.training.per_device_train_batch_size > images:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)")
        return 100.0

    return measure


def test_batches_that_were_chosen_shrink_until_they_fit(monkeypatch):
    monkeypatch.setattr(auto_config, "measure_speed", measure_with_memory_for(20))
    args, recipe = parse_recipe([YOUR_IMAGES])
    auto_config.fit_sizes(args, rows_of([(32, 32)] * 300), recipe)
    before = args.training.per_device_train_batch_size
    auto_config.fit_length(args, model_config(args.model, ["a", "b"]), 300, recipe)

    assert (before, args.training.per_device_train_batch_size, args.training.gradient_accumulation_steps) == (
        64,
        16,
        4,
    )
    assert "per_device_train_batch_size 16: the device has no memory for larger batches" in recipe.choices()


def test_batches_that_would_fill_the_memory_of_a_computer_shrink_before_it_ends_the_process(monkeypatch):
    monkeypatch.setattr(auto_config, "measure_speed", lambda config, args: 100.0)
    # B/16 at 224 pixels takes 0.12 GB per image, and half of the memory serves.
    monkeypatch.setattr(auto_config.psutil, "virtual_memory", lambda: SimpleNamespace(available=8e9))
    flags = ["--model", "B/16", "--image_size", "224", "--use_cpu", "true"]
    args, recipe = parse_recipe([YOUR_IMAGES, *flags])
    auto_config.fit_sizes(args, rows_of([(224, 224)] * 500), recipe)
    auto_config.fit_length(args, model_config(args.model, ["a", "b"]), 500, recipe)

    training = args.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (32, 4)


def test_batches_of_a_flag_do_not_shrink(monkeypatch):
    monkeypatch.setattr(auto_config, "measure_speed", measure_with_memory_for(20))
    args, recipe = parse_recipe([YOUR_IMAGES, "--per_device_train_batch_size", "64"])
    auto_config.fit_sizes(args, rows_of([(32, 32)] * 300), recipe)
    with pytest.raises(RuntimeError, match="MPS backend out of memory"):
        auto_config.fit_length(args, model_config(args.model, ["a", "b"]), 300, recipe)


def test_wrong_value_is_the_users_mistake_where_the_speed_is_measured(class_folders, tmp_path):
    with pytest.raises(UserError, match=r"^'fast' is not a choice of speed\."):
        train.main([YOUR_IMAGES, "--data", str(class_folders), "--output_dir", str(tmp_path / "run"), "--speed_choice",
                    "fast", "--learning_rate=-1"])  # fmt: skip


def test_speed_is_measured_and_leaves_random_state_and_configuration_alone(monkeypatch):
    monkeypatch.setattr(auto_config, "SECONDS", 0.1)
    monkeypatch.setattr(optimize, "_choose", lambda *args: ("eager", {}))
    flags = ["--image_size", "16", "--patch_size", "8", "--hidden_size", "16", "--num_hidden_layers", "1",
             "--num_attention_heads", "2", "--intermediate_size", "16", "--use_cpu", "true"]  # fmt: skip
    args, _ = parse_recipe([YOUR_IMAGES, *flags])
    config = model_config(args.model, ["a", "b"])
    before = torch.get_rng_state()

    speed = auto_config.measure_speed(config, args)

    assert 1 < speed < math.inf
    assert torch.equal(torch.get_rng_state(), before)
    assert config._attn_implementation != "eager"


def test_speed_of_a_model_of_one_number_is_measured(monkeypatch):
    monkeypatch.setattr(auto_config, "images_per_second", lambda step, seconds: step())
    flags = ["--image_size", "16", "--patch_size", "8", "--hidden_size", "16", "--num_hidden_layers", "1",
             "--num_attention_heads", "2", "--intermediate_size", "16", "--use_cpu", "true"]  # fmt: skip
    args, _ = parse_recipe([YOUR_IMAGES, *flags, "--speed_choice", "plain"])
    config = model_config(args.model, ["age"])
    config.problem_type, config.label_mean, config.label_scale = "regression", [40.0], [12.0]

    assert auto_config.measure_speed(config, args) > 0


@pytest.mark.parametrize(("heads", "width"), [("3", 192), ("1", 64)])
def test_width_fits_to_the_heads_that_are_set(heads, width):
    assert fitted([(32, 32)] * 50, "--num_attention_heads", heads)[0]["hidden_size"] == width


def test_smaller_images_of_the_first_part_are_counted_as_faster_by_their_pixels(monkeypatch):
    monkeypatch.setattr(auto_config, "images_per_second", lambda step, seconds: 100.0)
    flags = ["--image_size", "16", "--patch_size", "4", "--hidden_size", "16", "--num_hidden_layers", "1",
             "--num_attention_heads", "2", "--intermediate_size", "16", "--use_cpu", "true",
             "--initial_image_size", "8", "--initial_image_size_fraction", "0.25"]  # fmt: skip
    args, _ = parse_recipe([YOUR_IMAGES, *flags])

    speed = auto_config.measure_speed(model_config(args.model, ["a", "b"]), args)

    assert speed == pytest.approx(100 * (0.75 + 0.25 * 4))


def test_a_check_tells_the_time_itself(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        length(2_000, 100.0, monkeypatch, "--check", "true")

    assert "Training will take" not in caplog.text


def test_own_photographs_of_mixed_modes_train_with_the_recipe_and_the_choices_are_kept(
    class_folders, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(auto_config, "SECONDS", 0.1)
    for number, mode in enumerate(["L", "RGBA", "P", "CMYK"]):
        path = class_folders / "temple" / f"{number:02}.jpg"
        with Image.open(path) as image:
            image.resize((90 + 20 * number, 70)).convert(mode).save(path.with_suffix(".tif"))
        path.unlink()
    short = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "1"]
    argv = [YOUR_IMAGES, "--data", str(class_folders), *short, "--output_dir", str(tmp_path / "run"),
            "--use_cpu", "true", "--disable_tqdm", "true"]  # fmt: skip

    with caplog.at_level("INFO"):
        metrics = train.main(argv)

    assert math.isfinite(metrics["test_loss"])
    assert "image_size 64: half of the images are 64 pixels or less on their shorter side\n" in caplog.text
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (recipe["patch_size"], recipe["max_steps"]) == ([8], 2)

    # A resumed run makes the choices of the run that it goes on with, whatever the machine says now.
    monkeypatch.setattr(auto_config, "CPU_MODEL", (64, 2))
    monkeypatch.setattr(auto_config, "measure_speed", lambda *_: pytest.fail("the speed is measured"))
    train.main([*argv, "--resume_from_checkpoint", "true"])
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text()) == recipe
    with pytest.raises(UserError, match=r"with another recipe: weight_decay 0\.5"):
        train.main([*argv, "--resume_from_checkpoint", "true", "--weight_decay", "0.5"])


def test_numbers_are_neither_mixed_nor_changed_by_a_policy(monkeypatch):
    monkeypatch.setattr(auto_config, "measure_speed", lambda *_: 1e6)
    args, recipe = parse_recipe([YOUR_IMAGES, "--num_train_epochs", "500"])
    config = model_config(args.model, ["angle"])
    config.problem_type = "regression"

    auto_config.fit_length(args, config, 1000, recipe)

    assert (args.augmentation.auto_augment, args.mixing.mixup_alpha, args.mixing.cutmix_alpha) == ("none", 0, 0)
