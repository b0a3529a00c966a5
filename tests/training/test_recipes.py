import re

import pytest

from hf_vit_scratch.data.augmentation import training_stages
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.training.recipe import RECIPES, model_config, parse_recipe

SHIPPED = sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_recipe_describes_a_model_and_a_training(recipe):
    (model, _, augmentation, mixing, training), _ = parse_recipe([str(recipe)])

    config = model_config(model, [str(label) for label in range(10)])
    training_stages(config.image_height_width, **vars(augmentation))
    Mixup(10, **vars(mixing), label_smoothing=training.label_smoothing_factor)
    assert training.output_dir == f"runs/{recipe.stem}"


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_recipe_states_its_command_result_and_cost(recipe):
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    header = "\n".join(header)
    command = "vit-scratch train" if recipe.stem == "digits" else f"vit-scratch train {recipe.stem}"
    command += {"your_images": " --data FOLDER", "finetune": " --data FOLDER --model MODEL"}.get(recipe.stem, "")
    assert re.search(rf"^# Command +{re.escape(command)}$", header, re.MULTILINE)
    assert re.search(r"^# Result +(test accuracy \d+\.\d%.* seed|not run)", header, re.MULTILINE)
    assert re.search(r"^# Cost +(\d+.* seconds|not run)", header, re.MULTILINE)
