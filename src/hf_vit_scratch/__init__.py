"""A Vision Transformer from scratch, as a Hugging Face model.

Importing the package registers its classes with transformers' auto classes.
"""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
)

from .model.configuration_vit_scratch import ViTScratchConfig
from .model.modeling_vit_scratch import (
    ViTScratchBackbone,
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
)
from .speed.optimize import optimize

__all__ = [
    "ViTScratchBackbone",
    "ViTScratchConfig",
    "ViTScratchForImageClassification",
    "ViTScratchForMaskedImageModeling",
    "ViTScratchModel",
    "optimize",
]

# exist_ok: a notebook may reload the package.
AutoConfig.register(ViTScratchConfig.model_type, ViTScratchConfig, exist_ok=True)
AutoModel.register(ViTScratchConfig, ViTScratchModel, exist_ok=True)
AutoModelForImageClassification.register(ViTScratchConfig, ViTScratchForImageClassification, exist_ok=True)
AutoModelForMaskedImageModeling.register(ViTScratchConfig, ViTScratchForMaskedImageModeling, exist_ok=True)
AutoBackbone.register(ViTScratchConfig, ViTScratchBackbone, exist_ok=True)
