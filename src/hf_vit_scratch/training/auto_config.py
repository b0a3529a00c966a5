"""Choose what a recipe leaves open: by the training images, the device, and the speed measured on it.

Sizes come first (`fit_sizes`). Length and regularization (`fit_length`) need the model that follows from them.
"""

import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset
from numpy.typing import NDArray

from ..data.images import map_images, size_and_mode
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from ..speed.hardware import can_compile
from ..speed.optimize import of_first_process, optimize
from .arguments import Arguments, ViTTrainingArguments, is_starting_model, set_fields
from .optimizers import build_optimizer, freeze
from .recipe import Recipe

logger = logging.getLogger(__name__)

SAMPLE_SIZE = 500  # images whose modes and sizes are read
SECONDS = 1.0  # for each measurement of speed
IMAGE_SIZES = (32, 48, 64, 96, 128, 160, 192, 224)  # to choose from, reduced to multiples of a patch that is set
CPU_MODEL, SMALL_MODEL, LARGE_MODEL = (128, 4), (192, 6), (384, 12)  # width and number of layers
HEAD_SIZE = 64
TIME_FOR_STEPS = 0.9  # share of the training time; the rest goes to augmentation, evaluation and checkpoints
MINUTES_TO_COMPILE = 10  # from which on compiling pays for itself on a CPU
FEWEST_PASSES, MOST_PASSES = 30, 600
FASTER = 1.5  # a machine may be so much faster than it was when its speed was measured
PASSES_SAVED = 10  # a trained model needs so many times fewer
# From so many passes over the same images on, they are mixed, and changed by a policy as well. Both would hide what is
# small in them from a new model, so they begin after these shares of training.
PASSES_TO_MIX, PASSES_FOR_POLICY = 40, 150
MIXING_START, POLICY_START = 0.125, 0.5
SMALL_CROP, LARGE_CROP = 0.35, 0.6  # least share of the area
UNCHANGED_STEPS = 150  # the last ones, or a tenth of all if that is less: their images are neither changed nor mixed


def _choose(args: Arguments, recipe: Recipe, reason: str, **values: Any) -> None:
    """Set the fields that the recipe does not set."""
    values = {name: value for name, value in values.items() if name not in recipe.settings}
    set_fields(args, values)
    recipe.add(values, "images", reason)


def fit_sizes(args: Arguments, rows: Dataset, recipe: Recipe) -> None:
    """Choose the sizes of image, patch, model, batch and shifts, from the rows of the training split.

    Most images are not enlarged, and on a CPU an image has at most 64 tokens. The arguments are changed in place. The
    recipe's settings stay, and what is chosen is added to them.
    """
    model, training = args.model, args.training
    number, on_cpu = len(rows), training.device.type == "cpu"
    sides, _ = sizes_and_modes(rows)
    side, alike = int(np.median(sides.min(axis=1))), len(np.unique(sides, axis=0)) == 1
    choose = partial(_choose, args, recipe)

    largest = 64 if on_cpu else 224
    if model.image_size is None:  # a starting model has one
        multiple = math.lcm(*(model.patch_size or [int(model.model.partition("/")[2]) if model.model else 1]))
        sizes = [size // multiple * multiple for size in IMAGE_SIZES if size >= multiple] or [multiple]
        image_size = max([sizes[0], *(size for size in sizes if size <= min(side, largest))])
        choose(
            f"half of the images are {side} pixels or less on their shorter side"
            + (f", and a CPU is slow beyond {largest}" if on_cpu and side > largest else ""),
            image_size=[image_size],
        )
    pixels = ((model.image_size or []) * 2)[:2]  # height and width
    tokens = 64 if on_cpu or max(pixels) <= 64 else 256
    patches = [size for size in range(1, min(pixels) + 1) if not any(length % size for length in pixels)]
    patch_size = next((size for size in patches if math.prod(pixels) <= tokens * size**2), patches[-1])
    if model.model is None:  # which has sizes of its own
        choose(f"at most {tokens} patches per image", patch_size=[patch_size])
        width, layers = CPU_MODEL if on_cpu else SMALL_MODEL if number < 20_000 else LARGE_MODEL
        reason = "a CPU" if on_cpu else f"{number} images"
        choose(reason, hidden_size=HEAD_SIZE * model.num_attention_heads if model.num_attention_heads else width)
        width = model.hidden_size or width
        fitting = [heads for heads in range(1, width // HEAD_SIZE + 1) if width % (4 * heads) == 0]  # for rope2d
        choose(reason, num_hidden_layers=layers)
        choose(reason, num_attention_heads=max(fitting, default=1))
        choose(reason, intermediate_size=4 * width)
        patch = ((model.patch_size or [1]) * 2)[:2]
        first = [max(length * 3 // 4 // side, 1) * side for length, side in zip(pixels, patch, strict=True)]
        pair = {"initial_image_size": first, "initial_image_size_fraction": 0.6}
        if all(recipe.settings[name].value for name in pair if name in recipe.settings):  # else they are turned off
            choose("smaller images are faster", **pair)

    batch_size = 2 ** round(math.log2(min(max(number / 4 / training.world_size, 16), 128 if on_cpu else 512)))
    choose(f"about a quarter of {number} images, or less", per_device_train_batch_size=batch_size)
    images_at_once = training.train_batch_size * training.world_size
    rest = number % images_at_once
    if 0 < rest < min(number, images_at_once / 2):
        reason = (
            f"the last {rest} images of each pass, different ones each time, are left out: they would change the "
            "weights as much as a full batch"
        )
        choose(reason, dataloader_drop_last=True)
    if alike and max(sides[0]) <= max(pixels):
        choose("small images, all of one size", crop_padding=max(1, min(pixels) // 8))


def fit_length(args: Arguments, config: ViTScratchConfig, number: int, recipe: Recipe) -> None:
    """Choose the number of passes, the regularization that suits it, and whether compiling pays.

    The passes over the `number` training images are those that they deserve, or as many as fit into
    `max_train_minutes`. Arguments and recipe change as in `fit_sizes`, which comes before. A chosen batch shrinks if
    the device has no memory for it.
    """
    training = args.training
    choose = partial(_choose, args, recipe)
    speed = _measure_what_fits(config, args, recipe)
    minutes, visited = training.max_train_minutes or math.inf, images_in_pass(training, number)
    possible = TIME_FOR_STEPS * speed * 60 * minutes / visited
    if training.max_steps <= 0:
        wanted = round(min(max(300 * (2000 / number) ** 0.5, FEWEST_PASSES), MOST_PASSES))
        reason = f"the fewer images, the more passes; {number} images"
        if is_starting_model(args.model.model):
            wanted, reason = wanted // PASSES_SAVED, reason + ", and a trained model"
        if possible < wanted:
            fit = f"about {possible:.0f} fit into the {minutes:g} minutes, after which the run ends"
            reason = f"an upper limit; {fit}; {wanted} would be best"
            if not training.torch_compile:  # which may make a GPU several times as fast as it was measured
                wanted = min(wanted, math.ceil(FASTER * possible))
        choose(reason, num_train_epochs=float(wanted))
    passes = min(planned_passes(training, number), possible)
    expected = passes * visited / (TIME_FOR_STEPS * speed * 60)

    # A policy may change what a number measures, such as a brightness or an angle.
    mixes, changes = passes >= PASSES_TO_MIX, passes >= PASSES_FOR_POLICY and config.problem_type != "regression"
    seen = f"{passes:.0f} passes over the same images"
    if "crop_padding" not in recipe.settings:  # which shifts small images
        reason = f"{seen}; from {PASSES_TO_MIX} on, smaller parts of them"
        choose(reason, random_resized_crop_scale=SMALL_CROP if mixes else LARGE_CROP)
    reason = f"{seen}; from {PASSES_FOR_POLICY} on, random operations (a policy)"
    choose(reason, auto_augment="trivialaugment" if changes else "none")
    if args.augmentation.auto_augment != "none":  # 0.0 is recorded, too: a repeated run must not choose anew
        choose(reason, policy_start_fraction=POLICY_START if changes else 0.0)
    images_per_step = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    steps = passes * math.ceil(visited / images_per_step)
    unchanged = min(0.1, UNCHANGED_STEPS / steps)
    choose(
        f"about the last {unchanged * steps:.0f} of {steps:.0f} steps", augmentation_off_fraction=round(unchanged, 4)
    )
    if training.task == "image-classification" and config.problem_type != "regression":
        seen = f"{seen}; from {PASSES_TO_MIX} on, mixing"
        choose(seen, mixup_alpha=0.8 if mixes else 0.0, cutmix_alpha=1.0 if mixes else 0.0)
        if args.mixing.mixup_alpha or args.mixing.cutmix_alpha:
            choose(seen, mixing_start_fraction=MIXING_START if mixes else 0.0)
            choose(seen, mixup_prob=0.8 if changes else 0.5)

    compiles = expected >= MINUTES_TO_COMPILE and training.device.type == "cpu" and can_compile("cpu")
    pays = f"it pays in {MINUTES_TO_COMPILE} minutes of training or more, on a CPU with a C++ compiler"
    if not {"torch_compile_mode", "torch_compile_backend"} & recipe.settings.keys():  # which ask for it
        choose(f"{expected:.1f} minutes; {pays}", torch_compile=compiles)
    if not training.check:  # which tells the time itself
        logger.info(
            "Training will take about %.1f minutes: about %.0f passes over %d images, %.0f a second on average.",
            expected, passes, number, TIME_FOR_STEPS * speed,
        )  # fmt: skip


def _measure_what_fits(config: ViTScratchConfig, args: Arguments, recipe: Recipe) -> float:
    """Measure the speed with smaller batches, and more of them per step, until the device has memory for them."""
    training, names = args.training, {"per_device_train_batch_size", "gradient_accumulation_steps"}
    is_given = bool(names & recipe.values("recipe", "flag").keys())
    while True:
        batch, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
        stays = is_given or batch == 1 or training.world_size > 1  # other processes would wait
        if stays or not _fills_memory(config, training):
            try:
                return measure_speed(config, args)
            except RuntimeError as error:
                if stays or not should_reduce_batch_size(error):
                    raise
        values = {"per_device_train_batch_size": batch // 2, "gradient_accumulation_steps": 2 * steps}
        set_fields(args, values)
        recipe.add(values, "images", "the device has no memory for larger batches")


def _fills_memory(config: ViTScratchConfig, training: ViTTrainingArguments) -> bool:
    """Return whether a batch would take half of the free memory of a computer without a GPU, or of one that shares it.

    Linux ends a process that takes too much without an error. B/16 takes about 0.12 GB per image
    (benchmarks/2026-11-23_peers_cpu_memory.md).
    """
    tokens = config.num_prefix_tokens + math.prod(config.grid_size)
    needed = 64 * config.num_hidden_layers * tokens * config.hidden_size * training.train_batch_size
    return training.device.type in ("cpu", "mps") and needed > psutil.virtual_memory().available / 2


def measure_speed(config: ViTScratchConfig, args: Arguments) -> float:
    """Return the training steps' images per second on this machine, for all processes together.

    Random pixels, the run's own model, batch, precision and optimizer. Smaller images of a first stage are taken to be
    as much faster as they have fewer pixels. Weights, gradients and random state of the run are untouched.
    """
    augmentation, training = args.augmentation, args.training
    device, batch_size, size = training.device, training.train_batch_size, config.image_height_width
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = precisions.get(training.mixed_precision)  # which may be accelerate's choice
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    first, share = augmentation.initial_image_size or size, augmentation.initial_image_size_fraction
    faster = 1 - share + share * math.prod(size) / (first[0] * first[-1])
    with torch.random.fork_rng():
        config = copy.deepcopy(config)
        config.problem_type = config.label_mean = config.label_scale = None  # any loss takes as long
        model = ViTScratchForImageClassification(config).train().to(device)
        freeze(model, training.freeze_layers)
        checkpoint_activations(model, training)
        pixel_values = torch.randn(batch_size, config.num_channels, *size, device=device)
        labels = torch.zeros(batch_size, dtype=torch.long, device=device)
        optimizer = build_optimizer(model, training, torch.optim.AdamW, {"fused": True})
        with autocast:
            optimize(model, pixel_values, training=True, choice=training.speed_choice)

        def step() -> int:
            with autocast:
                loss = model(pixel_values, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the device
            return batch_size

        speed = of_first_process(images_per_second(step, SECONDS))  # all measure at once, as in training
    return speed * training.world_size * faster


def checkpoint_activations(model: Any, training: ViTTrainingArguments) -> None:
    """Save memory if the arguments ask for it. The stock Trainer does so when training begins, after a check."""
    if training.gradient_checkpointing:  # also for its new name
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its old name


def images_per_second(step: Callable[[], int], seconds: float) -> float:
    """Return the speed of a function that handles images and returns their number. Its first call is not counted."""
    step()
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        images += step()
    return images / (time.perf_counter() - start)


def images_in_pass(training: ViTTrainingArguments, number: int) -> int:
    """Return how many of so many images a pass visits, without those of a last batch that is left out."""
    batch = training.train_batch_size * training.world_size
    return number - number % batch if training.dataloader_drop_last else number


def planned_passes(training: ViTTrainingArguments, number: int) -> float:
    """Return the passes over so many images that the arguments ask for, whatever the clock allows."""
    images = (
        training.max_steps * training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    )
    return images / images_in_pass(training, number) if images > 0 else training.num_train_epochs


def sizes_and_modes(rows: Dataset) -> tuple[NDArray[np.int64], Counter[str]]:
    """Return (width, height) in pixels of some of the images, (n, 2), and how many there are of each mode."""
    chosen = np.random.default_rng(0).permutation(len(rows))[:SAMPLE_SIZE]
    found = [*map_images(lambda place, row: size_and_mode(row, f"image {chosen[place]}"), rows.select(chosen))]
    return np.array([size for size, _ in found]), Counter(mode for _, mode in found)
