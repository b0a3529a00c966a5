"""transformers' common tests of models, on our classes in both encoder styles. `tests/peer/run` starts this file.

Not among them: the exporters' mixin, which is not distributed; those of FSDP, tensor and expert parallelism, which
skip what is not on their lists of language models; and the one of image processors, of which we have none.
"""

import random
import unittest
from unittest import mock

import stand_ins
import torch
from tests.test_backbone_common import BackboneTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, floats_tensor
from tests.test_pipeline_mixin import PipelineTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers import ViTImageProcessor
from transformers.models.auto import modeling_auto

from hf_vit_scratch import (
    ViTScratchBackbone,
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
)
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchPatchEmbeddings

# What would fail, and why it may. What a test skips by itself, pytest lists.
EXCLUDED = {
    "test_resize_tokens_embeddings": "reads config.vocab_size, the number of words",
}

# By these names the tests know which class takes labels, which takes masks, and which has no loss.
modeling_auto.MODEL_MAPPING_NAMES["vit_scratch"] = "ViTScratchModel"
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["vit_scratch"] = "ViTScratchBackbone"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["vit_scratch"] = "ViTScratchForImageClassification"
modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES["vit_scratch"] = "ViTScratchForMaskedImageModeling"


class ModelTester:
    """Sizes under the names that the tests read, and the configuration and the inputs that they give."""

    batch_size = 3
    image_size = 12
    patch_size = 3
    num_channels = 3
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    intermediate_size = 48
    mask_length = (image_size // patch_size) ** 2
    num_masks = mask_length // 2
    seq_length = 1 + mask_length
    is_training = True
    sequence_classification_class = ViTScratchForImageClassification  # what the test of training trains

    def __init__(self, norm_first):
        self.norm_first = norm_first

    def get_config(self):
        return ViTScratchConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            norm_first=self.norm_first,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.num_channels, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": floats_tensor(shape, rng=random.Random(0))}


class Models(ModelTesterMixin):
    all_model_classes = (
        ViTScratchModel,
        ViTScratchForImageClassification,
        ViTScratchForMaskedImageModeling,
        ViTScratchBackbone,
    )

    def test_config(self):
        fields = {"norm_first": self.model_tester.norm_first, "hidden_size": 36}
        ConfigTester(self, ViTScratchConfig, has_text_modality=False, **fields).run_common_tests()

    def test_can_init_all_missing_weights(self):
        # The test leaves alone the models of before 2023, and those whose file begins without a year.
        file = stand_ins.FOLDER / "year.py"
        file.write_text("# Copyright 2026\n")
        with mock.patch("inspect.getfile", return_value=str(file)):
            super().test_can_init_all_missing_weights()

    def test_enable_input_require_grads_with_gradient_checkpointing(self):
        # The test passes over input embeddings without a weight; ours is the convolution's.
        weight = property(lambda self: self.projection.weight)
        with mock.patch.object(ViTScratchPatchEmbeddings, "weight", weight, create=True):
            super().test_enable_input_require_grads_with_gradient_checkpointing()

    def test_model_get_set_embeddings(self):
        # transformers' own asks for an nn.Embedding of words.
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), ViTScratchPatchEmbeddings)
            patch_embeddings = torch.nn.Identity()
            model.set_input_embeddings(patch_embeddings)
            assert model.base_model.embeddings.patch_embeddings is patch_embeddings
            assert model.get_output_embeddings() is None


class Backbone(BackboneTesterMixin):
    all_model_classes = (ViTScratchBackbone,)
    config_class = ViTScratchConfig


class Training(TrainingTesterMixin):
    model_tester = None

    def setUp(self):
        super().setUp()
        config = self.model_tester.get_config()
        config.vocab_size = None  # the test reads it whatever the model
        self.model_tester.get_config = lambda: config

    # The test trains on words only: for images it has neither a batch nor a branch.
    def _get_model_modality(self):
        return "text"

    def _create_text_training_batch(self, batch_size, **kwargs):
        _, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return {"pixel_values": inputs["pixel_values"][:batch_size], "labels": torch.arange(batch_size)}


class Pipelines(PipelineTesterMixin):
    pipeline_model_mapping = {
        "image-classification": ViTScratchForImageClassification,
        "image-feature-extraction": ViTScratchModel,
    }

    def setUp(self):
        super().setUp()
        size = {"height": self.model_tester.image_size, "width": self.model_tester.image_size}
        for model_class in self.pipeline_model_mapping.values():
            folder = stand_ins.TINY / "vit_scratch" / model_class.__name__
            model_class(self.model_tester.get_config()).save_pretrained(folder)
            ViTImageProcessor(size=size).save_pretrained(folder)


class Style:
    def setUp(self):
        self.model_tester = ModelTester(self.norm_first)


for name in dir(Pipelines):  # a test for every task there is; ours are these two
    if name.startswith("test_") and not name.startswith(("test_pipeline_image_c", "test_pipeline_image_f")):
        setattr(Pipelines, name, None)
for name, reason in EXCLUDED.items():
    setattr(Models, name, unittest.skip(f"excluded: {reason}")(getattr(Models, name)))
for style, norm_first in {"PostLN": False, "PreLN": True}.items():
    for group in (Models, Backbone, Training, Pipelines):
        name = style + group.__name__
        globals()[name] = type(name, (group, Style, unittest.TestCase), {"norm_first": norm_first})
