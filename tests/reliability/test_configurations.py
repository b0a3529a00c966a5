"""Configurations and recipes of all kinds: each makes a model that works, or is refused in words that help."""

import os
import warnings

import pytest
import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers.activations import ACT2FN

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.model.configuration_vit_scratch import POOLINGS, POSITION_EMBEDDING_TYPES, PROBLEM_TYPES
from hf_vit_scratch.training.arguments import ARGUMENT_TYPES
from hf_vit_scratch.training.recipe import model_config, parse_recipe

pytestmark = pytest.mark.slow

LONG = os.environ.get("RELIABILITY") == "long"
CONFIGURATIONS, RECIPES = (10_000, 3_000) if LONG else (1_500, 200)
SEARCH = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

SMALL = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
PLAUSIBLE = {
    "image_size": st.sampled_from([8, 12, 16, [8, 16], (16, 8)]),
    "patch_size": st.sampled_from([1, 2, 4, 8, [2, 4], (8, 8)]),
    "num_channels": st.integers(1, 5),
    "hidden_size": st.sampled_from([4, 8, 12, 16, 24, 32, 48]),
    "num_hidden_layers": st.integers(1, 3),
    "num_attention_heads": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "intermediate_size": st.integers(1, 40),
    "hidden_act": st.sampled_from(sorted(ACT2FN)),
    "layer_norm_eps": st.floats(1e-12, 1),
    "initializer_range": st.floats(1e-6, 10),
    "patch_initializer_range": st.none() | st.floats(1e-6, 10),
    "hidden_dropout_prob": st.floats(0, 0.99),
    "attention_probs_dropout_prob": st.floats(0, 0.99),
    "drop_path_rate": st.floats(0, 0.99),
    "position_embedding_type": st.sampled_from(POSITION_EMBEDDING_TYPES),
    "pooling": st.sampled_from(POOLINGS),
    "use_cls_token": st.sampled_from([None, True, False]),
    "classifier_hidden_size": st.none() | st.integers(1, 20),
    "classifier_act": st.sampled_from(sorted(ACT2FN)),
    "num_labels": st.integers(1, 5),
    "problem_type": st.sampled_from([None, *PROBLEM_TYPES]),
} | {name: st.booleans() for name in ("qkv_bias", "norm_first", "qk_norm", "fc_norm", "is_causal")}
NUMBERS = st.integers(-3, 40) | st.floats() | st.booleans() | st.sampled_from([-(10**18), 1e300])
ODD = st.one_of(
    NUMBERS,
    st.none(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(NUMBERS, max_size=3),
    st.tuples(NUMBERS, NUMBERS),
    st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2),
)


REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError)
if Version(transformers.__version__) < Version("5.23"):  # 5.17 refuses fields of its own by this; between: not tried
    REFUSALS += (StrictDataclassFieldValidationError,)


@st.composite
def fields(draw):
    """Mostly plausible values; in half of the cases one or two that are not."""
    names = sorted(PLAUSIBLE)
    chosen = {name: draw(PLAUSIBLE[name]) for name in draw(st.sets(st.sampled_from(names)))}
    for name in draw(st.lists(st.sampled_from(names), max_size=2)) if draw(st.booleans()) else ():
        chosen[name] = draw(ODD)
    return SMALL | chosen


def test_configuration_makes_a_model_that_works_or_is_refused_by_the_name_of_its_field(figure):
    made, refused = 0, 0

    @settings(SEARCH, max_examples=CONFIGURATIONS)
    @given(fields())
    def search(values):
        nonlocal made, refused
        try:
            config = ViTScratchConfig(**values)
            model = ViTScratchForImageClassification(config)
        except REFUSALS as error:
            if not any(name in str(error) for name in values):
                raise AssertionError(f"{values} is refused without a name") from error
            refused += 1
            return
        height, width = config.image_height_width
        with torch.no_grad():
            logits = model(torch.zeros(2, config.num_channels, height, width)).logits
        assert logits.shape == (2, config.num_labels)
        made += 1

    search()

    assert min(made, refused) > CONFIGURATIONS / 20
    figure(f"{made + refused:,} configurations: {made:,} made a model that works, {refused:,} were refused by name")


FLAGS = sorted(
    name
    for kind in ARGUMENT_TYPES
    for name in kind.__dataclass_fields__
    if name not in ("output_dir", "model", "data")
)
WORDS = ["no", "steps", "epoch", "true", "cosine", "adamw_torch", "[4, 4]", "1e-3"]
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.yaml"


def test_recipe_is_understood_or_refused(recipe_file, figure):
    understood, refused = 0, 0

    @settings(SEARCH, max_examples=RECIPES)
    @given(st.dictionaries(st.sampled_from(FLAGS) | st.text(max_size=6), VALUES, max_size=3))
    def search(values):
        nonlocal understood, refused
        recipe_file.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a flag of transformers is an old one, for example
                (model, *_), _ = parse_recipe([str(recipe_file), "--use_cpu", "true"])
                model_config(model, ["a", "b"])
        except UserError:
            refused += 1
            return
        understood += 1

    search()

    assert min(understood, refused) > RECIPES / 20
    figure(f"{understood + refused:,} recipes: {understood:,} understood, {refused:,} refused in a sentence")
