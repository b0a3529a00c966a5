"""The trained model that a run starts from."""

import logging
from pathlib import Path
from typing import Any, cast

from ..conversion.names import LoadedModel, weights_of
from ..errors import UserError
from ..model.configuration_vit_scratch import VARIANTS, ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchPreTrainedModel
from .arguments import Arguments, is_starting_model

logger = logging.getLogger(__name__)

# Learning rate times width: twice that of MAE for batches of 128 (He et al. 2021, table 9). A model 128 wide kept what
# it knew at 6e-3 and lost it at 2e-2 (benchmarks/2026-11-25_finetune.md).
HIGHEST_RATE = 1e-3 * 768


def load_starting_model(args: Arguments) -> LoadedModel | None:
    """Load the trained model that `--model` names, converted if it is another library's; `None` for random weights.

    Its image size becomes that of the run if no other one is given.
    """
    name, training = args.model.model, args.training
    if name is None or not is_starting_model(name):
        return None
    from ..conversion.convert import load  # a quarter of a second, which most runs need not spend

    try:
        start = load(name, num_attention_heads=args.model.num_attention_heads, pooling=args.model.pooling)
    except UserError as error:
        sizes = f" A new model is named by its size, such as S/16 (sizes {', '.join(VARIANTS)}, then the patch size)."
        raise UserError(f"--model: {error}{'' if Path(name).exists() else sizes}") from error
    if (channels := start.model.config.num_channels) != 3:
        raise UserError(f"--model {name} is for images with num_channels {channels}, but every image is read as RGB.")
    if start.image_processor is None:
        raise UserError(
            f"--model {name} does not say how RGB pixels are normalized. Save a ViTImageProcessor with image_mean and "
            "image_std in the model's folder; `vit-scratch convert` makes a folder of a weights file."
        )
    height, width = start.model.config.image_height_width
    args.model.image_size = args.model.image_size or ([height] if height == width else [height, width])
    if training.learning_rate * start.model.config.hidden_size > HIGHEST_RATE and training.freeze_layers != "all":
        logger.warning(
            "A learning_rate of %g is high for a trained model of width %d, which may forget what it knows. Try "
            "--learning_rate 5e-4 --layer_decay 0.75, as in the recipe finetune.",
            training.learning_rate, start.model.config.hidden_size,
        )  # fmt: skip
    return start


def build_from(
    start: LoadedModel, name: str, model_class: type[ViTScratchPreTrainedModel], config: ViTScratchConfig
) -> ViTScratchPreTrainedModel:
    """Build a model with the weights of the starting model, in float32. Its classifier is new if the classes differ.

    The positions of the starting model are interpolated to the image size of `config`.
    """
    source, old_grid = start.model.float(), start.model.config.grid_size
    source.set_image_size(config.image_size)
    weights = weights_of(source)
    if source.config.id2label != config.id2label:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier.")}
    model = model_class(config)
    state = {name: weights.get(name.removeprefix("vit."), tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # shares its memory with the starting model

    processor, head = cast(Any, start.image_processor), ""
    if hasattr(model, "classifier"):
        head = f", {'its' if 'classifier.weight' in weights else 'new'} classifier for {config.num_labels} classes"
    grids = "" if old_grid == config.grid_size else ", positions resampled from {}x{} to {}x{}"
    logger.info(
        "Starts from %s (%s): %d layers of %d%s, pixel mean %s and std %s%s%s",
        name, start.kind, config.num_hidden_layers, config.hidden_size, grids.format(*old_grid, *config.grid_size),
        list(processor.image_mean), list(processor.image_std), head, start.assumed and f"; {start.assumed}",
    )  # fmt: skip
    return model
