"""A Vision Transformer [1] as a Hugging Face `PreTrainedModel`, to be read from top to bottom.

    pixels -> patches -> + class token, + positions -> encoder layers -> pooled vector -> logits -> loss

Shapes: B images, C channels, rows x cols patches, N tokens (the class token, if any, and the patches), D hidden_size,
H attention heads, K = D // H, L num_labels.

[1] Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929, equations (1) to (4).
[2] Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762.
[3] Devlin et al. 2019, BERT, https://arxiv.org/abs/1810.04805.
[4] Xie et al. 2022, SimMIM, https://arxiv.org/abs/2111.09886.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_vit_scratch import ViTScratchConfig


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return scaled dot-product attention, softmax(q k^T * scaling) v, and its weights; [2] eq. 1.

    Shapes: query, key and value (B, H, N, K) -> context (B, N, H, K) and weights (B, H, N, N). Row i of the weights
    says how much token i takes from each token. `attention_mask` is added to the scores.
    """
    scores = (query * scaling) @ key.transpose(-2, -1)  # (B, H, N, N)
    if attention_mask is not None:
        scores = scores + attention_mask
    attn_weights = scores.softmax(dim=-1).to(query.dtype)  # under autocast, softmax returns float32
    attn_weights = F.dropout(attn_weights, p=dropout, training=module.training)
    return (attn_weights @ value).transpose(1, 2), attn_weights


def rope2d_cos_sin(
    grid: tuple[int, int], head_dim: int, num_prefix_tokens: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the axial rotary position embedding: two (N, K / 2), on the device of `like`.

    Patch centers have coordinates in (-1, 1), which mean the same at any image size. The first half of the K / 2
    angles depends on y, the second on x: angle_j = 2 pi coordinate / 100^(4 j / K), j = 0 .. K / 4 - 1. The class
    token is not rotated. Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34 (there pairs are neighbors), in the
    axial form of Heo et al. 2024, https://arxiv.org/abs/2403.13298, with DINOv3's frequencies (arXiv 2508.10104).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    axes = ((torch.arange(n, device=like.device, dtype=dtype) + 0.5) * (2 / n) - 1 for n in grid)
    exponents = torch.arange(head_dim // 4, device=like.device, dtype=dtype) * (4 / head_dim)
    frequencies = 2 * torch.pi / 100.0**exponents  # (K / 4,)
    angles = torch.cartesian_prod(*axes)[..., None] * frequencies  # (rows * cols, 2, K / 4): y, then x
    angles = F.pad(angles.flatten(1), (0, 0, num_prefix_tokens, 0))  # (N, K / 2)
    return angles.cos(), angles.sin()


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels (k, k + K / 2) of each token by its angle.  (B, H, N, K) -> (B, H, N, K)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # in half precision or autocast, the table is float32
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ViTScratchRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight has the dtype of its input, which torch's fused kernel needs under autocast on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ViTScratchAttention(nn.Module):
    """Multi-head self-attention: every token takes a weighted mean of all; [1] appendix A.

    (B, N, D) -> (B, N, D), and the attention weights (B, H, N, N), or None if the implementation gives none.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.is_causal = config.is_causal  # flash and sdpa read it; without it, sdpa takes True
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        # Query-key norm, Henry et al. 2020, https://arxiv.org/abs/2010.04245, but by RMSNorm: scores stay small.
        self.q_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value, each (B, N, D); `optimize` may replace it by one product."""
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # of `rope2d_cos_sin`
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in self.project(hidden_states))  # (B, N, H, K)
        query = self.q_norm(query).transpose(1, 2)  # (B, H, N, K)
        key = self.k_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        if position_embeddings is not None:
            query, key = (apply_rotary_pos_emb(x, *position_embeddings) for x in (query, key))

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            attn_implementation or self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        context, attn_weights = attention_interface(
            self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, dropout=dropout, **kwargs
        )  # (B, N, H, K)
        return self.o_proj(context.flatten(2)), attn_weights


class ViTScratchMLP(nn.Module):
    """Two linear layers with an activation between them, token by token; [1] section 3.1.  (B, N, D) -> (B, N, D)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(hidden_states)))


class ViTScratchDropPath(nn.Dropout):
    """Stochastic depth: in training, a residual branch is dropped for some images, by dropout of one number per image.

    (B, N, D) -> (B, N, D). After Huang et al. 2016, https://arxiv.org/abs/1603.09382. A kept branch is divided by the
    probability of keeping it, so its mean stays the same.
    """

    def forward(self, branch: Tensor) -> Tensor:
        is_active = self.training and self.p > 0
        return branch * super().forward(branch.new_ones(len(branch), 1, 1)) if is_active else branch


class ViTScratchLayer(GradientCheckpointingLayer):
    """One encoder layer: attention, then MLP, each a residual branch f.  (B, N, D) -> (B, N, D), weights.

    norm_first=True   pre-LN,  [1] eq. 2 and 3:      x + f(LN(x))
    norm_first=False  post-LN, [2] section 3.1, [3]: LN(x + f(x))
    """

    def __init__(self, config: ViTScratchConfig, drop_path_prob: float):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = ViTScratchAttention(config)
        self.mlp = ViTScratchMLP(config)
        # Named as in transformers' ViT, to load its weights. Under post-LN each follows its residual sum.
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = ViTScratchDropPath(drop_path_prob)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.norm_first:
            branch, attn_weights = self.attention(self.layernorm_before(x), attention_mask, **kwargs)
            x = x + self.drop_path(self.dropout(branch))
            x = x + self.drop_path(self.dropout(self.mlp(self.layernorm_after(x))))
        else:
            branch, attn_weights = self.attention(x, attention_mask, **kwargs)
            x = self.layernorm_before(x + self.drop_path(self.dropout(branch)))
            x = self.layernorm_after(x + self.drop_path(self.dropout(self.mlp(x))))
        return x, attn_weights


class ViTScratchPatchEmbeddings(nn.Module):
    """Cut images into patches and project each linearly; [1] eq. 1, E.  (B, C, height, width) -> (B, rows * cols, D).

    A convolution whose stride is its kernel size does this: one matrix product per patch.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.num_channels, self.patch_size = config.num_channels, config.patch_height_width
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.patch_size, stride=self.patch_size)

    def grid_of(self, pixel_values: Tensor) -> tuple[int, int]:
        """Return the number of patches along the height and along the width of these images."""
        height, width = pixel_values.shape[2:]
        return height // self.patch_size[0], width // self.patch_size[1]

    def forward(self, pixel_values: Tensor) -> Tensor:
        shape, (patch_height, patch_width) = pixel_values.shape, self.patch_size
        fits = len(shape) == 4 and shape[1] == self.num_channels and pixel_values.is_floating_point()
        if not fits or shape[2] % patch_height != 0 or shape[3] % patch_width != 0:
            raise ValueError(
                f"pixel_values must be a floating point tensor of the shape (batch, {self.num_channels} channels, "
                f"height, width), divisible by the patch size {patch_height}x{patch_width}, got {pixel_values.dtype} "
                f"of shape {tuple(shape)}. Use the image processor: "
                "AutoImageProcessor.from_pretrained(...)(images, return_tensors='pt')."
            )
        # Pixels come from the image processor in float32; the weights may be in half precision.
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        return patches.flatten(2).transpose(1, 2).contiguous()  # or without a class token, each norm copies them


def sincos2d_positions(grid: tuple[int, int], hidden_size: int, num_prefix_tokens: int = 0) -> Tensor:
    """Return the fixed 2D positions of Beyer et al. 2022, https://arxiv.org/abs/2205.01580.  (N, D).

    Token (y, x) gets [sin(x w), cos(x w), sin(y w), cos(y w)] for D / 4 frequencies w from 1 down to 1 / 10000. The
    class token, which has no place in the grid, gets zeros.
    """
    # On the CPU, because not every device has float64.
    places = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in grid))  # (rows * cols, 2): y, then x
    frequencies = 10_000.0 ** -torch.linspace(0, 1, hidden_size // 4, dtype=torch.float64, device="cpu")  # (D / 4,)
    y_angles, x_angles = places.T[..., None] * frequencies  # each (rows * cols, D / 4)
    positions = torch.cat((x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()), dim=1)
    return F.pad(positions, (0, 0, num_prefix_tokens, 0))


def interpolate_pos_encoding(positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings to another grid ([1] section 3.2), bicubically as transformers does.

    Shapes: (1, prefix + rows * cols, D) -> (1, prefix + new rows * new cols, D). The class token's stays as it is.
    """
    # An export for any size must trace the interpolation, even where the grids are equal now.
    for_any_size = torch.compiler.is_exporting() and any(isinstance(length, torch.SymInt) for length in new_grid)
    if not for_any_size and old_grid == new_grid:
        return positions
    num_prefix_tokens = positions.shape[1] - math.prod(old_grid)
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    patches = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, cols)
    dtype = torch.promote_types(patches.dtype, torch.float32)
    patches = F.interpolate(patches.to(dtype), size=new_grid, mode="bicubic", align_corners=False)
    return torch.cat((prefix, patches.to(positions.dtype).flatten(2).transpose(1, 2)), dim=1)


class ViTScratchEmbeddings(nn.Module):
    """Patches, the class token, and positions; [1] eq. 1.  (B, C, height, width) -> (B, N, D), and the patches' grid.

    Masked patches, True in (B, rows * cols), are replaced by the mask token; [4] section 3.2. With
    `norm_first=False` a LayerNorm follows, as in the code of [3]. Images of another size get interpolated positions.
    """

    def __init__(self, config: ViTScratchConfig, use_mask_token: bool = False):
        super().__init__()
        self.grid_size = config.grid_size  # the positions' own: a model that shares `config` may change its size
        self.patch_embeddings = ViTScratchPatchEmbeddings(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.num_prefix_tokens else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        # "learned" and "rope2d" have trained positions (rope2d also rotates queries and keys), "sincos2d" fixed ones.
        positions = torch.zeros(1, config.num_prefix_tokens + math.prod(config.grid_size), config.hidden_size)
        if config.position_embedding_type == "sincos2d":
            self.register_buffer("position_embeddings", positions)
        else:
            self.position_embeddings = nn.Parameter(positions)
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm = nn.Identity() if config.norm_first else norm
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        embeddings = self.patch_embeddings(pixel_values)
        dtype = embeddings.dtype  # half precision under autocast; positions in float32 would change it
        grid = self.patch_embeddings.grid_of(pixel_values)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos needs a mask token: use ViTScratchForMaskedImageModeling.")
            expected, given = tuple(embeddings.shape[:2]), tuple(bool_masked_pos.shape)
            if given != expected:
                raise ValueError(f"bool_masked_pos must have one entry per patch: shape {expected}, got {given}.")
            embeddings = torch.where(bool_masked_pos[..., None].bool(), self.mask_token, embeddings)
        if self.cls_token is not None:
            embeddings = torch.cat((self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings), dim=1)
        embeddings = embeddings + interpolate_pos_encoding(self.position_embeddings, self.grid_size, grid)
        return self.dropout(self.layernorm(embeddings.to(dtype))), grid


class ViTScratchPreTrainedModel(PreTrainedModel):
    """The base of every model here: what transformers asks of it, initial weights, and loading at another size."""

    config: ViTScratchConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    # The loss is the mean of a batch, so the Trainer must divide it by the number of accumulation steps. Without this
    # line, **kwargs in `forward` would tell it that the loss is divided by `num_items_in_batch` already.
    accepts_loss_kwargs = False
    supports_gradient_checkpointing = True
    _no_split_modules = ["ViTScratchEmbeddings", "ViTScratchLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _input_embed_layer = "patch_embeddings"
    # Another model's head or mask token is dropped without a warning.
    _keys_to_ignore_on_load_unexpected = {r"^classifier\.", r"^pre_logits\.", r"^decoder\.", r"\bmask_token$"}

    def __init__(self, config: ViTScratchConfig, *args: Any, **kwargs: Any):
        config.validate()  # fields can be set after construction, by from_pretrained among others
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights and tokens from a normal distribution. Biases are zero; norms have scale one and bias zero.

        The functions of `init` leave loaded tensors alone. Values are cut at -2 and 2, not at two standard deviations.
        """
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Conv2d):
            if isinstance(module, nn.Conv2d) and module.in_channels == self.config.num_channels:  # of the patches
                std = self.config.patch_initializer_range or module.weight[0].numel() ** -0.5  # by the fan-in
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, ViTScratchEmbeddings):
            for parameter in module.parameters(recurse=False):  # tokens, and positions unless they are fixed
                init.trunc_normal_(parameter, std=std)
            if self.config.position_embedding_type == "sincos2d":
                sizes = (self.config.grid_size, self.config.hidden_size, self.config.num_prefix_tokens)
                init.copy_(module.position_embeddings, sincos2d_positions(*sizes)[None])
        else:
            super()._init_weights(module)  # norms

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Self:
        """Load a saved model as transformers does, from safetensors only, because a pickle could run code.

        With another `image_size`, as in `from_pretrained(folder, image_size=[256, 320])` or in `config`, the positions
        are interpolated. With another patch size they are not.
        """
        kwargs["use_safetensors"] = True
        image_size = None  # transformers loads weights of the saved size only, so another one is set afterwards
        is_object = hasattr(config, "grid_size")  # not isinstance: remote code has a class of its own
        if not is_object and "patch_size" not in kwargs:
            image_size = kwargs.pop("image_size", None)
        elif is_object and pretrained_model_name_or_path is not None:
            options = kwargs | {"trust_remote_code": None}  # or transformers would warn that it has no effect
            fields, _ = type(config).get_config_dict(pretrained_model_name_or_path, **options)
            saved = type(config).from_dict(fields) if fields else config  # an adapter's folder has no config.json
            if saved.grid_size != config.grid_size and saved.patch_height_width == config.patch_height_width:
                image_size, config = config.image_size, copy.deepcopy(config)
                config.image_size = saved.image_size
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        if image_size is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
            model.set_image_size(image_size)
        return loaded

    @torch.no_grad()
    def set_image_size(self, image_size: int | list[int] | tuple[int, int]) -> None:
        """Change the image size (pixels, one number or a pair) of the configuration, and interpolate the positions.

        Fixed ones are interpolated, too: a place in the image keeps its meaning.
        """
        config = copy.copy(self.config)
        config.image_size = image_size
        config.validate()
        embeddings = cast(ViTScratchEmbeddings, self.base_model.embeddings)
        positions = interpolate_pos_encoding(embeddings.position_embeddings, embeddings.grid_size, config.grid_size)
        embeddings.position_embeddings.data, embeddings.grid_size = positions, config.grid_size
        self.config.image_size = image_size


class ViTScratchModel(ViTScratchPreTrainedModel):
    """The encoder: pixels to one vector per token, and one for the image; [1] eq. 1 to 4.

    Outputs:
        last_hidden_state: (B, N, D), after the final LayerNorm, which only pre-LN has; before it with `fc_norm`.
        pooler_output: (B, D), what the classifier reads: the class token of `last_hidden_state`, or the mean of its
            patch tokens; with `fc_norm`, then normalized. transformers' ViT has a trained layer here. Under
            `is_causal`, the class token sees no patch: use `pooling="mean"`.
        hidden_states: The embeddings and each layer's output, (B, N, D), before the final LayerNorm.
        attentions: Each layer's weights, (B, H, N, N).
    """

    def __init__(self, config: ViTScratchConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = ViTScratchEmbeddings(config, use_mask_token)
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            ViTScratchLayer(config, config.drop_path_rate * (depth / last if last else 1))
            for depth in range(config.num_hidden_layers)
        )
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm = norm if config.norm_first else nn.Identity()  # [1] eq. 4
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs has the output flags, too
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: (B, C, height, width), normalized, of any size that the patch size divides. Positions are
                always interpolated: `interpolate_pos_encoding`, which transformers' ViT needs for this, is ignored.
            bool_masked_pos: (B, rows * cols), True for patches to replace by the mask token, if the model has one.
            output_attentions: Whether to return `attentions`; if so, this call uses eager attention.
            output_hidden_states: Whether to return `hidden_states`.
            kwargs: Passed on to the attention function. `attn_implementation` chooses eager, sdpa or
                flex_attention for this call.

        Raises:
            ValueError: The pixels or the mask have a wrong dtype or shape, or an option needs another configuration.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states

        hidden_states, grid = self.embeddings(pixel_values, bool_masked_pos)
        options: dict[str, Any] = {name: value for name, value in kwargs.items() if name != "interpolate_pos_encoding"}
        is_causal = options.pop("is_causal", None)
        if options.pop("attention_mask", None) is not None or is_causal not in (None, config.is_causal):
            raise ValueError("A call takes no attention_mask, and is_causal is a field of the configuration.")
        implementation = "eager" if output_attentions else kwargs.get("attn_implementation")
        if implementation is not None:  # mask functions read the config, layers read the options
            config = copy.copy(config)
            config._attn_implementation = options["attn_implementation"] = implementation
        mask = create_causal_mask(config, hidden_states, None, None) if config.is_causal else None
        if config.position_embedding_type == "rope2d":
            head_dim = config.hidden_size // config.num_attention_heads
            options["position_embeddings"] = rope2d_cos_sin(grid, head_dim, config.num_prefix_tokens, hidden_states)

        # Not transformers' `capture_outputs`: it looks a model up by the name of its class, which FSDP2 replaces.
        all_hidden_states, all_attentions = ([hidden_states] if output_hidden_states else []), []
        for layer in self.layers:
            hidden_states, attn_weights = layer(hidden_states, mask, **options)
            if output_hidden_states:  # otherwise their memory can be freed
                all_hidden_states.append(hidden_states)
            if output_attentions:
                all_attentions.append(attn_weights)

        # With `fc_norm`, pool first, then normalize. LayerNorm and mean do not commute, so the order matters.
        last_hidden_state = hidden_states if config.fc_norm else self.layernorm(hidden_states)
        patches = last_hidden_state[:, config.num_prefix_tokens :]
        pooled = last_hidden_state[:, 0] if config.pooling == "cls" else patches.mean(dim=1)
        return BaseModelOutputWithPooling(
            last_hidden_state=last_hidden_state,
            pooler_output=self.layernorm(pooled) if config.fc_norm else pooled,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": F.cross_entropy,
    "multi_label_classification": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
}


class ViTScratchForImageClassification(ViTScratchPreTrainedModel):
    """The encoder and a classifier on its pooled vector.

    `config.problem_type` chooses the loss: cross-entropy (`"single_label_classification"`, the default for two or
    more labels), binary cross-entropy (`"multi_label_classification"`), or the squared error (`"regression"`, the
    default for one label). Class probabilities as labels, from MixUp for example, stay cross-entropy: unlike in
    transformers, float labels do not change the loss.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32, num_labels=10)
        >>> model = ViTScratchForImageClassification(config)
        >>> model(torch.zeros(2, 3, 32, 32), labels=torch.tensor([3, 7])).logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ViTScratchConfig):
        if config.problem_type is None and config.num_labels == 1:
            config.problem_type = "regression"  # otherwise pipelines apply a sigmoid to the number
        super().__init__(config)
        if config.is_causal and config.pooling == "cls":
            raise ValueError("is_causal=True needs pooling='mean': the class token, being first, would see no patch.")
        if not config.num_labels:
            raise ValueError(f"num_labels must be at least 1, got {config.num_labels}.")
        # Not in `config.validate`: `from_pretrained` changes fields one after another.
        lengths = [None if numbers is None else len(numbers) for numbers in (config.label_mean, config.label_scale)]
        if config.problem_type == "regression" and lengths not in ([None] * 2, [config.num_labels] * 2):
            raise ValueError(
                f"label_mean and label_scale must have a number for each of the {config.num_labels} labels, got "
                f"{config.label_mean} and {config.label_scale}."
            )
        self.num_labels = config.num_labels  # as in transformers' classifiers
        self.vit = ViTScratchModel(config)
        width = config.classifier_hidden_size or config.hidden_size
        self.pre_logits: nn.Module = nn.Identity()
        if config.classifier_hidden_size is not None:  # [1] section 3.1: one hidden layer at pre-training time
            self.pre_logits = nn.Sequential(nn.Linear(config.hidden_size, width), ACT2FN[config.classifier_act])
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()
        # After `post_init`, which adds the encoder's patterns: loading must report an unused `pre_logits`.
        self._keys_to_ignore_on_load_unexpected = {r"^decoder\.", r"\bmask_token$"}

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images, with the arguments of `ViTScratchModel.forward`.

        `labels` are class ids (B,) or class probabilities (B, L); for multi-label classification, zeros and ones
        (B, L); for regression, numbers (B, L), or (B,) if L is 1. With `label_scale`, the loss is that of standardized
        labels, and logits are in the units of the labels.
        """
        outputs = self.vit(pixel_values, return_dict=True, **kwargs)
        logits = self.classifier(self.pre_logits(outputs.pooler_output))
        loss = None if labels is None else self._loss(logits, labels)
        if self.config.problem_type == "regression" and self.config.label_scale is not None:
            dtype = torch.promote_types(logits.dtype, torch.float32)  # bfloat16 rounds 1990 to 1992
            std, mean = logits.new_tensor([self.config.label_scale, self.config.label_mean], dtype=dtype)
            logits = logits * std + mean
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar."""
        # Not `self.loss_function`, which changes `config.problem_type` when labels are floats.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision is too coarse for a loss
        labels = labels.to(logits.device)  # where the head is, if the model is spread over several devices
        problem_type = self.config.problem_type or "single_label_classification"
        has_ids = problem_type == "single_label_classification" and not labels.is_floating_point()
        if self.config.num_labels == 1 and labels.ndim == 1 and not has_ids:
            labels = labels[:, None]
        expected = tuple(logits.shape[:1] if has_ids else logits.shape)
        if labels.shape != expected:
            raise ValueError(
                f"labels must have the shape {expected} for {problem_type}, got {labels.dtype} of shape "
                f"{tuple(labels.shape)}. Class ids are integers (batch,); other labels are (batch, num_labels)."
            )
        if problem_type == "regression" and self.config.label_scale is not None:
            labels = (labels - logits.new_tensor(self.config.label_mean)) / logits.new_tensor(self.config.label_scale)
        return LOSSES[problem_type](logits, labels.long() if has_ids else labels.to(logits.dtype))


class ViTScratchForMaskedImageModeling(ViTScratchPreTrainedModel):
    """The encoder and a linear decoder that reconstructs masked patches: SimMIM [4], training without labels.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32)
        >>> mask = torch.tensor([[True, False, False, True]])
        >>> ViTScratchForMaskedImageModeling(config)(torch.zeros(1, 3, 32, 32), mask).reconstruction.shape
        torch.Size([1, 3, 32, 32])
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        if config.fc_norm:
            raise ValueError("fc_norm=True would leave the decoded tokens unnormalized: use fc_norm=False.")
        self.vit = ViTScratchModel(config, use_mask_token=True)
        # One matrix product per patch. In a Sequential, so that parameters have transformers' names.
        num_values = config.num_channels * math.prod(config.patch_height_width)
        self.decoder = nn.Sequential(nn.Conv2d(config.hidden_size, num_values, kernel_size=1))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedImageModelingOutput:
        """Reconstruct images, with the arguments of `ViTScratchModel.forward`.

        The loss is the mean absolute error of the masked pixels. Without `bool_masked_pos` there is none.
        """
        outputs = self.vit(pixel_values, bool_masked_pos, return_dict=True, **kwargs)
        patch_size = self.config.patch_height_width
        patches = outputs.last_hidden_state[:, self.config.num_prefix_tokens :].transpose(1, 2)  # (B, D, rows * cols)
        patches = self.decoder(patches[..., None]).flatten(2)  # (B, C * pixels of a patch, rows * cols)
        reconstruction = F.fold(patches, pixel_values.shape[2:], patch_size, stride=patch_size)

        loss = None
        if bool_masked_pos is not None:
            dtype = torch.promote_types(reconstruction.dtype, torch.float32)
            pixels, mask = (x.to(reconstruction.device, dtype) for x in (pixel_values, bool_masked_pos))
            error = F.l1_loss(reconstruction.to(dtype), pixels, reduction="none")
            error = F.avg_pool2d(error, patch_size).mean(dim=1).flatten(1)  # of each patch, (B, rows * cols)
            # [4] section 3.4. A batch without a masked patch has a loss of zero.
            loss = (error * mask).sum() / mask.sum().clamp(min=1)
        return MaskedImageModelingOutput(loss, reconstruction, outputs.hidden_states, outputs.attentions)


class ViTScratchBackbone(BackboneMixin, ViTScratchModel):
    """The encoder as a source of feature maps, for models that detect or segment; `config.out_features` chooses them.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32, out_features=["stage6", "stage12"])
        >>> [tuple(maps.shape) for maps in ViTScratchBackbone(config)(torch.zeros(1, 3, 32, 64)).feature_maps]
        [(1, 192, 2, 4), (1, 192, 2, 4)]
    """

    def __init__(self, config: ViTScratchConfig):
        config = copy.deepcopy(config)
        config.set_output_features_output_indices(config.out_features, None)  # or a saved config would name no stage
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)

    @can_return_tuple
    @filter_output_hidden_states  # computes hidden states, and returns them only if the caller wants them
    def forward(self, pixel_values: Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """Return the patch tokens after each of the chosen stages as maps, with the arguments of `ViTScratchModel`.

        Each map passes through the final LayerNorm, as in DINOv2's backbone, unless `fc_norm` is set.
        """
        outputs = ViTScratchModel.forward(self, pixel_values, return_dict=True, **kwargs)  # super() is the mixin
        grid = self.embeddings.patch_embeddings.grid_of(pixel_values)
        feature_maps = []
        for stage, hidden_states in zip(self.stage_names, outputs.hidden_states, strict=True):
            if stage in self.out_features:
                normed = hidden_states if self.config.fc_norm else self.layernorm(hidden_states)
                patches = normed[:, self.config.num_prefix_tokens :]
                feature_maps.append(patches.transpose(1, 2).unflatten(2, grid))  # (B, D, rows, cols)
        return BackboneOutput(tuple(feature_maps), outputs.hidden_states, outputs.attentions)


__all__ = [
    "ViTScratchBackbone", "ViTScratchForImageClassification", "ViTScratchForMaskedImageModeling", "ViTScratchModel",
    "ViTScratchPreTrainedModel",
]  # fmt: skip
