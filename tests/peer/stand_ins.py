"""What transformers' test files need of their repository and its source distribution leaves out. Import it first."""

import json
import os
import re
import sys
import types
from pathlib import Path

from PIL import Image
from transformers import pipeline

import tests  # transformers', not ours: a package comes before a plain folder of that name

FOLDER = Path(tests.__file__).parent
TINY = FOLDER.parent / "tiny"  # small saved models, which transformers takes from the Hub
IMAGES = [Image.new(mode, (40, 30)) for mode in ("RGB", "RGBA", "L", "LA")]


class ImageClassificationPipelineTests:
    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32"):
        return pipeline("image-classification", model, image_processor=image_processor, dtype=dtype), IMAGES

    def run_pipeline_test(self, classify, images):
        for scores in classify(images):
            assert {entry["label"] for entry in scores} == set(classify.model.config.id2label.values())
            assert abs(sum(entry["score"] for entry in scores) - 1) < 1e-2


class ImageFeatureExtractionPipelineTests:
    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32"):
        return pipeline("image-feature-extraction", model, image_processor=image_processor, dtype=dtype), IMAGES

    def run_pipeline_test(self, extract, images):
        config = extract.model.config
        num_tokens = config.num_prefix_tokens + config.grid_size[0] * config.grid_size[1]
        for [tokens] in extract(images):
            assert [len(token) for token in tokens] == [config.hidden_size] * num_tokens


def stand_in(name, **contents):
    module = types.ModuleType(f"tests.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module


# Every class out of a folder of `tests`, empty; then the few that must have something in them.
for file in ("test_modeling_common.py", "test_configuration_common.py", "test_pipeline_mixin.py"):
    for name, content in re.findall(r"^from \.(\w+\.\w+) import (\w+)$", (FOLDER / file).read_text(), re.MULTILINE):
        stand_in(name, **{content: type(content, (), {})})
stand_in(
    "pipelines.test_pipelines_image_classification",
    ImageClassificationPipelineTests=ImageClassificationPipelineTests,
)
stand_in(
    "pipelines.test_pipelines_image_feature_extraction",
    ImageFeatureExtractionPipelineTests=ImageFeatureExtractionPipelineTests,
)
stand_in(
    "utils.test_configuration_utils",
    config_common_kwargs={  # fields of every configuration, none of them at its default
        "architectures": ["ViTScratchModel"],
        "chunk_size_feed_forward": 5,
        "dtype": "float16",
        "id2label": {0: "one"},
        "label2id": {"one": 0},
        "output_attentions": True,
        "output_hidden_states": True,
        "problem_type": "regression",
        "return_dict": False,
    },
)

os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = str(TINY)
classes = {"tokenizer_classes": [], "processor_classes": ["ViTImageProcessor"]}
(TINY / "reports").mkdir(parents=True)
(TINY / "reports" / "tiny_model_summary.json").write_text(
    json.dumps({"ViTScratchModel": classes, "ViTScratchForImageClassification": classes})
)
# They execute the library beside them once more; an empty one leaves the installed library alone.
(FOLDER.parent / "src" / "transformers").mkdir(parents=True)
(FOLDER.parent / "src" / "transformers" / "__init__.py").touch()
