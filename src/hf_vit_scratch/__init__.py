"""A Vision Transformer from scratch, as a Hugging Face model.

Importing the package registers the classes with transformers' auto classes; nothing else happens.
"""

from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from .configuration_vit_scratch import ViTScratchConfig
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

AutoConfig.register(ViTScratchConfig.model_type, ViTScratchConfig)
AutoModel.register(ViTScratchConfig, ViTScratchModel)
AutoModelForImageClassification.register(ViTScratchConfig, ViTScratchForImageClassification)

__all__ = ["ViTScratchConfig", "ViTScratchForImageClassification", "ViTScratchModel"]
