"""A Vision Transformer from scratch, as a Hugging Face model.

Importing the package lets transformers' auto classes know the model; nothing else happens. torch and transformers are
loaded when something is taken from the package, and the classes are registered when the auto classes are loaded, or at
once where they are already.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from .configuration_vit_scratch import ViTScratchConfig
    from .modeling_vit_scratch import (
        ViTScratchBackbone,
        ViTScratchForImageClassification,
        ViTScratchForMaskedImageModeling,
        ViTScratchModel,
    )

__all__ = [
    "ViTScratchBackbone",
    "ViTScratchConfig",
    "ViTScratchForImageClassification",
    "ViTScratchForMaskedImageModeling",
    "ViTScratchModel",
]


def __getattr__(name: str) -> Any:
    """Load a class when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "configuration_vit_scratch" if name == "ViTScratchConfig" else "modeling_vit_scratch"
    globals()[name] = getattr(importlib.import_module(f".{file}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    """For completion: also what is not loaded yet."""
    return sorted({*globals(), *__all__})


# When the auto classes are loaded, so are ours, unless it is ours that load them; once both are there, ours register.
# Ours alone do not load the auto classes, with their hundreds of models. exist_ok: a notebook may reload the package.


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _load_configuration(auto: ModuleType) -> None:
    importlib.import_module(".configuration_vit_scratch", __name__)


@wrapt.when_imported("transformers.models.auto.modeling_auto")
def _load_models(auto: ModuleType) -> None:
    importlib.import_module(".modeling_vit_scratch", __name__)


@wrapt.when_imported(f"{__name__}.configuration_vit_scratch")
def _register_configuration(ours: ModuleType) -> None:
    @wrapt.when_imported("transformers.models.auto.configuration_auto")
    def register(auto: ModuleType) -> None:
        auto.AutoConfig.register(ours.ViTScratchConfig.model_type, ours.ViTScratchConfig, exist_ok=True)


@wrapt.when_imported(f"{__name__}.modeling_vit_scratch")
def _register_models(ours: ModuleType) -> None:
    @wrapt.when_imported("transformers.models.auto.modeling_auto")
    def register(auto: ModuleType) -> None:
        for auto_class, model_class in (
            (auto.AutoModel, ours.ViTScratchModel),
            (auto.AutoModelForImageClassification, ours.ViTScratchForImageClassification),
            (auto.AutoModelForMaskedImageModeling, ours.ViTScratchForMaskedImageModeling),
            (auto.AutoBackbone, ours.ViTScratchBackbone),
        ):
            auto_class.register(ours.ViTScratchConfig, model_class, exist_ok=True)
