"""A Vision Transformer [1] as a Hugging Face `PreTrainedModel`, to be read from top to bottom.

    pixels -> patches -> + class token, + positions -> L encoder layers -> pooled token -> logits -> loss

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
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_peft_available, logging
from transformers.utils.generic import can_return_tuple

from .configuration_vit_scratch import ViTScratchConfig

logger = logging.get_logger(__name__)


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
    """Scaled dot-product attention, softmax(q k^T * scaling) v, written out: [2] eq. 1.

    Shapes: query, key and value (B, H, N, K) -> context (B, N, H, K) and probabilities (B, H, N, N), of which row i
    says how much token i takes from each token. `attention_mask` is added to the scores.
    """
    scores = query * scaling @ key.transpose(-2, -1)  # (B, H, N, N); the queries are fewer numbers than the scores
    if attention_mask is not None:
        scores = scores + attention_mask
    # torch adds the exponentials up in float32 for bfloat16 too, where the small ones would be lost. Autocast may give
    # the result in float32.
    attn_weights = scores.softmax(dim=-1).to(query.dtype)
    attn_weights = F.dropout(attn_weights, p=dropout, training=module.training)
    return (attn_weights @ value).transpose(1, 2), attn_weights


def interpolate_pos_encoding(positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Interpolate the position embeddings of the patches to another grid, bicubically; [1] section 3.2.

    Shapes: (1, prefix + rows * cols, D) -> (1, prefix + new rows * new cols, D). The positions before those of the
    patches (the class token's) stay as they are.
    """
    # A graph that is exported for any size must resample at the model's own, too.
    for_any_size = torch.compiler.is_exporting() and any(isinstance(length, torch.SymInt) for length in new_grid)
    if not for_any_size and old_grid == new_grid:
        return positions
    num_prefix_tokens = positions.shape[1] - math.prod(old_grid)
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    patches = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, cols)
    dtype = torch.promote_types(patches.dtype, torch.float32)
    patches = F.interpolate(patches.to(dtype), size=new_grid, mode="bicubic", align_corners=False)
    return torch.cat((prefix, patches.to(prefix.dtype).flatten(2).transpose(1, 2)), dim=1)


def sincos2d_positions(grid: tuple[int, int], hidden_size: int) -> Tensor:
    """Fixed 2D sine and cosine positions of Beyer et al. 2022 (https://arxiv.org/abs/2205.01580).  (rows * cols, D).

    Token (y, x) gets [sin(x w), cos(x w), sin(y w), cos(y w)] for D / 4 frequencies w from 1 down to 1 / 10000.
    """
    # On the CPU also while a model is built on the meta device, to be filled from a file.
    y, x = torch.meshgrid(*(torch.arange(n, device="cpu") for n in grid), indexing="ij")
    frequencies = 10_000.0 ** -torch.linspace(0, 1, hidden_size // 4, dtype=torch.float64, device="cpu")  # (D / 4,)
    x_angles = x.flatten()[:, None] * frequencies
    y_angles = y.flatten()[:, None] * frequencies
    return torch.cat((x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()), dim=1)


def rope2d_cos_sin(
    grid: tuple[int, int], head_dim: int, num_prefix_tokens: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Axial rotary position embedding, as cosines and sines: two (N, K / 2), on the device of `like`.

    The patch centres have coordinates in [-1, 1], so that another image size keeps their meaning. The first half of
    the K / 2 angles turns with y, the second with x: angle_j = 2 pi coordinate / 100^(4 j / K), j = 0 .. K / 4 - 1.
    The class token is not turned. Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, in the axial form of Heo
    et al. 2024, https://arxiv.org/abs/2403.13298, with the frequencies of DINOv3, https://arxiv.org/abs/2508.10104.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    y, x = ((torch.arange(n, device=like.device, dtype=dtype) + 0.5) * (2 / n) - 1 for n in grid)
    exponents = torch.arange(head_dim // 4, device=like.device, dtype=dtype) * (4 / head_dim)
    frequencies = 2 * torch.pi / 100.0**exponents  # (K / 4,)
    y_angles = (y[:, None] * frequencies)[:, None].expand(*grid, -1)
    x_angles = (x[:, None] * frequencies)[None].expand(*grid, -1)
    angles = torch.cat((y_angles, x_angles), dim=-1).flatten(0, 1)  # (rows * cols, K / 2)
    angles = F.pad(angles, (0, 0, num_prefix_tokens, 0))  # (N, K / 2)
    return angles.cos(), angles.sin()


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (k, k + K / 2) of each token by its angle.  (B, H, N, K) -> (B, H, N, K)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # under autocast the queries have fewer bits than the table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ViTScratchPatchEmbeddings(nn.Module):
    """Cut images into patches and project each linearly; [1] eq. 1, E.  (B, C, height, width) -> (B, rows * cols, D).

    A convolution whose stride is its kernel is exactly that: one matrix product per patch.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_size = config.patch_height_width
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.patch_size
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        self.check(pixel_values)
        # Pixels come from the image processor in float32; the weights may be in half precision.
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)

    def grid_size(self, pixel_values: Tensor) -> tuple[int, int]:
        """Return the number of patches along the height and along the width of these images."""
        height, width = pixel_values.shape[2:]
        return height // self.patch_size[0], width // self.patch_size[1]

    def check(self, pixel_values: Tensor) -> None:
        """Check that images can be cut into patches.

        Raises:
            TypeError: The pixels are not floating point.
            ValueError: The rank, the number of channels, or the size of the images is wrong.
        """
        if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
            given = pixel_values.dtype if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
            raise TypeError(
                f"pixel_values must be a floating point tensor of normalised pixels, got {given}. Use the image "
                "processor: AutoImageProcessor.from_pretrained(...)(images, return_tensors='pt')."
            )
        if pixel_values.ndim != 4:
            raise ValueError(
                "pixel_values must have the shape (batch, channels, height, width), got "
                f"{tuple(pixel_values.shape)}. A single image needs a batch axis: pixel_values[None]."
            )
        _, num_channels, height, width = pixel_values.shape
        if num_channels != self.num_channels:
            raise ValueError(
                f"pixel_values must have {self.num_channels} channels (config.num_channels) on axis 1, got "
                f"{tuple(pixel_values.shape)}."
            )
        patch_height, patch_width = self.patch_size
        if height < patch_height or width < patch_width or height % patch_height != 0 or width % patch_width != 0:
            raise ValueError(
                f"pixel_values must have a height and width divisible by the patch size {patch_height}x{patch_width}, "
                f"got {height}x{width}. Resize the images, as the image processor does."
            )


class ViTScratchEmbeddings(nn.Module):
    """Patches, the class token before them, and positions; [1] eq. 1.

    Shapes: (B, C, height, width) -> (B, N, D), and the grid (rows, cols) of the patches.

    Masked patches, True in (B, rows * cols), are replaced by the mask token; [4] section 3.2. In the BERT style a
    LayerNorm follows ([3], as published in code). An image of another size than `image_size` gets its positions
    interpolated.
    """

    def __init__(self, config: ViTScratchConfig, use_mask_token: bool = False):
        super().__init__()
        self.config = config
        self.patch_embeddings = ViTScratchPatchEmbeddings(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.num_prefix_tokens else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        # One table of the trained grid, whether learned or fixed, so that both are saved and resampled alike.
        positions = torch.zeros(1, config.num_prefix_tokens + math.prod(config.grid_size), config.hidden_size)
        if config.position_embedding_type == "sincos2d":
            self.register_buffer("position_embeddings", self.fixed_positions(config).to(positions.dtype))
        else:
            self.position_embeddings = nn.Parameter(positions)
        self.layernorm = (
            nn.Identity() if config.norm_first else nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    @staticmethod
    def fixed_positions(config: ViTScratchConfig) -> Tensor:
        """The sines and cosines of the grid; the class token, which has no place in it, has zeros.  (1, N, D)."""
        patches = sincos2d_positions(config.grid_size, config.hidden_size)
        return F.pad(patches, (0, 0, config.num_prefix_tokens, 0))[None]

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        embeddings = self.patch_embeddings(pixel_values)
        grid = self.patch_embeddings.grid_size(pixel_values)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError(
                    "bool_masked_pos needs a mask token: use ViTScratchForMaskedImageModeling, or "
                    "ViTScratchModel(config, use_mask_token=True)."
                )
            if bool_masked_pos.shape != embeddings.shape[:2]:
                raise ValueError(
                    f"bool_masked_pos must have one entry per patch: shape {tuple(embeddings.shape[:2])}, got "
                    f"{tuple(bool_masked_pos.shape)}."
                )
            embeddings = torch.where(bool_masked_pos[..., None].bool(), self.mask_token, embeddings)
        if self.cls_token is not None:
            embeddings = torch.cat((self.cls_token.expand(embeddings.shape[0], -1, -1), embeddings), dim=1)
        embeddings = embeddings + interpolate_pos_encoding(self.position_embeddings, self.config.grid_size, grid)
        return self.dropout(self.layernorm(embeddings)), grid


class ViTScratchRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows the dtype of its input, which torch's fused kernel needs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ViTScratchAttention(nn.Module):
    """Multi-head self-attention: every token takes a weighted mean of all; [1] appendix A.  (B, N, D) -> (B, N, D)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads  # the config guarantees no remainder
        self.dropout_prob = config.attention_probs_dropout_prob
        self.is_causal = config.is_causal  # read by the sdpa and flash backends, which take a missing one for True
        self.num_key_value_groups = 1  # likewise; to look for a missing one takes Python longer
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        # Henry et al. 2020, https://arxiv.org/abs/2010.04245, with RMSNorm: the scores cannot grow without bound.
        self.q_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # (B, N, H, K)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)  # (B, H, N, K)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if position_embeddings is not None:
            query, key = (apply_rotary_pos_emb(x, *position_embeddings) for x in (query, key))

        attention_interface: Callable = eager_attention_forward
        if not output_attentions:  # only the attention written out has its probabilities to give
            attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
        context, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.head_dim**-0.5,
            dropout=self.dropout_prob if self.training else 0.0,
            **kwargs,
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


class ViTScratchDropPath(nn.Module):
    """Stochastic depth: in training, drop a residual branch for whole images; Huang et al. 2016, arXiv 1603.09382.

    A kept branch is divided by the probability of keeping it, so that the expectation stays.  (B, N, D) -> (B, N, D).
    """

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, branch: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return branch
        keep_prob = 1 - self.drop_prob
        return branch * branch.new_empty(branch.shape[0], 1, 1).bernoulli_(keep_prob) / keep_prob

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}"


class ViTScratchLayer(GradientCheckpointingLayer):
    """One encoder layer: attention, then MLP, each a residual branch f.  (B, N, D) -> (B, N, D) and probabilities.

    norm_first=True   pre-LN,  [1] eq. 2 and 3:      x + f(LN(x))
    norm_first=False  post-LN, [2] section 3.1, [3]: LN(x + f(x))
    """

    def __init__(self, config: ViTScratchConfig, drop_path_prob: float):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = ViTScratchAttention(config)
        self.mlp = ViTScratchMLP(config)
        # The names are those of transformers' ViT, so that its weights load. Read them as "the attention branch's
        # norm" and "the MLP branch's norm"; under post-LN each comes after its branch.
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = ViTScratchDropPath(drop_path_prob)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        x = hidden_states
        if self.norm_first:
            branch, attn_weights = self.attention(self.layernorm_before(x), attention_mask, **kwargs)
            x = x + self.drop_branch(branch)
            branch = self.mlp(self.layernorm_after(x))
            x = x + self.drop_branch(branch)
        else:
            branch, attn_weights = self.attention(x, attention_mask, **kwargs)
            x = self.layernorm_before(x + self.drop_branch(branch))
            branch = self.mlp(x)
            x = self.layernorm_after(x + self.drop_branch(branch))
        return x, attn_weights

    def drop_branch(self, branch: Tensor) -> Tensor:
        """Dropout and stochastic depth.  (B, N, D) -> (B, N, D)."""
        # In evaluation both do nothing; even to call them is 2% of the time for a single small image.
        return self.drop_path(self.dropout(branch)) if self.training else branch


class ViTScratchPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every model of this file, how weights start, and loading at another size."""

    config: ViTScratchConfig
    config_class = ViTScratchConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["ViTScratchEmbeddings", "ViTScratchLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: ViTScratchConfig, *args: Any, **kwargs: Any):
        config.validate()  # fields can be set after construction, by from_pretrained among others
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set every parameter and buffer of `module`: truncated normal weights, zero biases, norms of one and zero.

        The functions of `transformers.initialization` leave alone what has been loaded from a file.
        """
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Conv2d):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ViTScratchEmbeddings):
            # Children come first: the convolution's second draw replaces the one that it got above.
            weight = module.patch_embeddings.projection.weight
            init.trunc_normal_(weight, std=self.config.patch_initializer_range or weight[0].numel() ** -0.5)
            if module.cls_token is not None:
                init.trunc_normal_(module.cls_token, std=std)
            if module.mask_token is not None:
                init.trunc_normal_(module.mask_token, std=std)
            if self.config.position_embedding_type == "sincos2d":
                init.copy_(module.position_embeddings, module.fixed_positions(self.config))
            else:
                init.trunc_normal_(module.position_embeddings, std=std)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Self:
        """Load a saved model, as in transformers; with another `image_size` its positions are interpolated.

        Weights are read from safetensors only: a pickle could run code.

        Args:
            pretrained_model_name_or_path: Folder, or name on the Hub.
            model_args: Passed on to transformers.
            config: A configuration instead of the saved one.
            kwargs: Any argument of transformers' own `from_pretrained`, or a field of the configuration to change.

        Example:
            `ViTScratchModel.from_pretrained(folder, image_size=[256, 320])`
        """
        kwargs["use_safetensors"] = True
        wanted_size = kwargs.get("image_size") if config is None else getattr(config, "image_size", None)
        if wanted_size is None or pretrained_model_name_or_path is None:  # None: the weights are an argument
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)

        # transformers compares the shapes of all tensors with those of the file. So load with the saved number of
        # patches, then change it.
        saved = cls._saved_config(pretrained_model_name_or_path, kwargs)
        wanted = copy.deepcopy(saved if config is None else config)
        wanted.image_size = wanted_size
        if config is None:
            wanted.patch_size = kwargs.get("patch_size", saved.patch_size)
        wanted.validate()
        resizes = wanted.grid_size != saved.grid_size
        if resizes:
            (rows, cols), (height, width) = saved.grid_size, wanted.patch_height_width
            size_in_file = [rows * height, cols * width]
            if config is None:
                kwargs["image_size"] = size_in_file
            else:
                config = wanted
                config.image_size = size_in_file
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        if resizes:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
            model.set_image_size(wanted_size)
        return loaded

    @classmethod
    def _saved_config(cls, name_or_path: Any, kwargs: dict[str, Any]) -> Any:
        """Return the saved configuration; for a folder or repository with an adapter, that of the adapted model."""
        names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        options = {name: kwargs[name] for name in names if name in kwargs}
        fields, _ = cls.config_class.get_config_dict(name_or_path, **options)
        if not fields and is_peft_available():
            from peft import PeftConfig

            name_or_path = PeftConfig.from_pretrained(str(name_or_path), **options).base_model_name_or_path
            options = {name: value for name, value in options.items() if name not in ("revision", "subfolder")}
        return cls.config_class.from_pretrained(name_or_path, **options)

    @torch.no_grad()
    def set_image_size(self, image_size: int | list[int] | tuple[int, int]) -> None:
        """Make the model one for another image size, in place: its configuration and its resampled positions.

        Not needed to call the model on another size, which resamples for that call.

        Args:
            image_size: Height and width in pixels, one number for both or a pair.

        Raises:
            TypeError: The size is not made of integers.
            ValueError: The patch size does not divide it, or the positions are offloaded.
        """
        embeddings = cast(ViTScratchEmbeddings, self.base_model.embeddings)
        if embeddings.position_embeddings.is_meta and hasattr(embeddings, "_hf_hook"):  # accelerate's
            raise ValueError(
                "position embeddings that are offloaded cannot be resampled: keep the embeddings on a device, or leave"
                " image_size as it is and call the model on the other size, which resamples for that call."
            )
        new_config = copy.deepcopy(self.config)
        new_config.image_size = image_size
        new_config.validate()
        positions = interpolate_pos_encoding(
            embeddings.position_embeddings, self.config.grid_size, new_config.grid_size
        )
        embeddings.position_embeddings.data = positions.clone()
        self.config.image_size = image_size


class ViTScratchModel(ViTScratchPreTrainedModel):
    """The encoder: pixels to one vector per token, and one for the image; [1] eq. 1 to 4.

    Outputs:
        last_hidden_state: (B, N, D), after the final LayerNorm that pre-LN needs; post-LN ends in one already. With
            `fc_norm`, before it.
        pooler_output: (B, D), what the classifier reads, without parameters of its own: the class token of
            `last_hidden_state`, or the mean of its patch tokens; with `fc_norm`, then normalised. (transformers' ViT
            has a tanh layer here.)
        hidden_states: The embeddings and each layer's output, (B, N, D). Under pre-LN the last one comes before the
            final LayerNorm, so it differs from `last_hidden_state`; as in transformers.
        attentions: Each layer's probabilities, (B, H, N, N).

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32)
        >>> ViTScratchModel(config)(torch.zeros(2, 3, 32, 32)).last_hidden_state.shape
        torch.Size([2, 5, 192])
    """

    # Loading the encoder out of another model's file leaves that model's head behind; the intention, not a mistake.
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^pre_logits\.", r"^decoder\.", r"\bmask_token$"]

    def __init__(self, config: ViTScratchConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = ViTScratchEmbeddings(config, use_mask_token)
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            ViTScratchLayer(config, config.drop_path_rate * (depth / last if last else 1))
            for depth in range(config.num_hidden_layers)
        )
        # Pre-LN leaves the residual stream unnormalised; [1] eq. 4.
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else nn.Identity()
        )
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs names the two flags as well
        self,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: (B, C, height, width), normalised by the image processor. Any height and width that the
                patch size divides.
            attention_mask: (B, N), 1 for the tokens that may be attended to and 0 for the others; the class token, if
                any, counts. Masked patches are left out of mean pooling too.
            bool_masked_pos: (B, rows * cols), True for the patches that the mask token replaces.
            output_attentions: Whether to return the attention probabilities. Only the attention written out has them,
                so this call then uses `"eager"` whatever `attn_implementation` is.
            output_hidden_states: Whether to return the hidden states.
            kwargs: Passed on to the attention function.

        Raises:
            TypeError: The pixels are not floating point.
            ValueError: The pixels or a mask have the wrong shape, or there is no mask token.
        """
        if output_attentions is None:
            output_attentions = bool(self.config.output_attentions)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)

        hidden_states, grid = self.embeddings(pixel_values, bool_masked_pos)
        position_embeddings = None
        if self.config.position_embedding_type == "rope2d":
            head_dim = self.config.hidden_size // self.config.num_attention_heads
            position_embeddings = rope2d_cos_sin(grid, head_dim, self.config.num_prefix_tokens, like=hidden_states)
        mask = self._attention_scores_mask(hidden_states, attention_mask, eager=output_attentions)

        all_hidden_states, all_attentions = [hidden_states], []
        for layer in self.layers:
            hidden_states, attn_weights = layer(
                hidden_states,
                mask,
                position_embeddings=position_embeddings,
                output_attentions=output_attentions,
                **kwargs,
            )
            if output_hidden_states:  # a reference would keep its memory
                all_hidden_states.append(hidden_states)
            if output_attentions:
                all_attentions.append(attn_weights)

        # LayerNorm and mean do not commute, so the order is part of the model.
        last_hidden_state = hidden_states if self.config.fc_norm else self.layernorm(hidden_states)
        pooled = self._pool(last_hidden_state, attention_mask)
        return BaseModelOutputWithPooling(
            last_hidden_state=last_hidden_state,
            pooler_output=self.layernorm(pooled) if self.config.fc_norm else pooled,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )

    def _attention_scores_mask(
        self, hidden_states: Tensor, attention_mask: Tensor | None, eager: bool
    ) -> Tensor | BlockMask | None:
        """What the attention function takes for the (B, N) mask and for causality; None where nothing is masked."""
        # A mask of four axes is taken as prepared for the attention function; transformers' masks allow that.
        if attention_mask is not None and attention_mask.ndim != 4 and attention_mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"attention_mask must have one entry per token, the class token included: shape "
                f"{tuple(hidden_states.shape[:2])}, got {tuple(attention_mask.shape)}."
            )
        config = self.config
        if eager and config._attn_implementation != "eager":
            logger.warning_once(
                f"output_attentions=True needs the attention written out, so this call uses 'eager' instead of "
                f"{config._attn_implementation!r}. To choose it for all calls: model.set_attn_implementation('eager')."
            )
            config = copy.copy(config)
            config._attn_implementation = "eager"
        if config.is_causal:
            return create_causal_mask(config, hidden_states, attention_mask, None)  # no cache; its name has changed
        return create_bidirectional_mask(config, hidden_states, attention_mask)

    def _pool(self, last_hidden_state: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The vector that the classifier reads.  (B, N, D) -> (B, D)."""
        if self.config.pooling == "cls":
            return last_hidden_state[:, 0]
        patches = last_hidden_state[:, self.config.num_prefix_tokens :]
        if attention_mask is None or attention_mask.ndim != 2:
            return patches.mean(dim=1)
        weights = attention_mask.to(patches)[:, self.config.num_prefix_tokens :, None]  # (B, rows * cols, 1)
        # An image of which every patch is masked has no mean: zeros, not NaN.
        return (patches * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class ViTScratchForImageClassification(ViTScratchPreTrainedModel):
    """The encoder and a classifier on its pooled vector.

    `config.problem_type` chooses the loss: cross-entropy (`"single_label_classification"`, and the default for two or
    more labels), binary cross-entropy (`"multi_label_classification"`), or the squared error (`"regression"`, and the
    default for one label). Class probabilities as labels, from MixUp for example, stay cross-entropy.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32, num_labels=10)
        >>> model = ViTScratchForImageClassification(config)
        >>> model(torch.zeros(2, 3, 32, 32), labels=torch.tensor([3, 7])).logits.shape
        torch.Size([2, 10])
    """

    # The loss is a plain mean over the batch, so the Trainer must divide it by the number of accumulation steps. It
    # does so only for a model that does not claim to take `num_items_in_batch`, and **kwargs would claim that.
    accepts_loss_kwargs = False
    # A classifier can start from an encoder that was trained on masked images.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"\bmask_token$"]

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        if config.is_causal and config.pooling == "cls":
            raise ValueError(
                "is_causal=True needs pooling='mean' in a classifier: the class token comes first, so it would see no "
                "patch and the logits would be the same for every image."
            )
        if not config.num_labels:
            raise ValueError(f"num_labels must be at least 1, got {config.num_labels}.")
        self.vit = ViTScratchModel(config)
        classifier_input = config.hidden_size
        self.pre_logits: nn.Module = nn.Identity()
        if config.classifier_hidden_size is not None:  # [1] section 3.1: one hidden layer at pre-training time
            classifier_input = config.classifier_hidden_size
            self.pre_logits = nn.Sequential(
                nn.Linear(config.hidden_size, classifier_input), ACT2FN[config.classifier_act]
            )
        self.classifier = nn.Linear(classifier_input, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (B, C, height, width), normalised by the image processor.
            labels: Class ids (B,), or class probabilities (B, L); zeros and ones (B, L) for multi-label
                classification; numbers (B, L), or (B,) for one label, for regression.
            kwargs: Any further argument of `ViTScratchModel.forward`.

        Raises:
            TypeError: The pixels are not floating point.
            ValueError: The pixels, the mask or the labels have the wrong shape.
        """
        outputs: BaseModelOutputWithPooling = self.vit(pixel_values, **kwargs)
        logits = self.classifier(self.pre_logits(outputs.pooler_output))
        return ImageClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar.

        Not `self.loss_function`: with float labels it changes `config.problem_type`, and it divides by
        `num_items_in_batch` for one problem type only.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision is too coarse for a loss
        problem_type = self.config.problem_type
        if problem_type is None:
            problem_type = "regression" if self.config.num_labels == 1 else "single_label_classification"

        if problem_type == "single_label_classification":
            if labels.shape != (logits if labels.is_floating_point() else logits[:, 0]).shape:
                raise ValueError(
                    "labels must be class ids of shape (batch,) or class probabilities of shape (batch, num_labels) = "
                    f"{tuple(logits.shape)}, got {labels.dtype} of shape {tuple(labels.shape)}."
                )
            return F.cross_entropy(logits, labels.to(logits.dtype) if labels.is_floating_point() else labels.long())

        if self.config.num_labels == 1 and labels.ndim == 1:
            labels = labels[:, None]
        if labels.shape != logits.shape:
            raise ValueError(
                f"labels must have the shape (batch, num_labels) = {tuple(logits.shape)} for {problem_type}, got "
                f"{tuple(labels.shape)}."
            )
        loss = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits, labels.to(logits.dtype))


class ViTScratchForMaskedImageModeling(ViTScratchPreTrainedModel):
    """The encoder and a linear decoder that paints the patches which were masked: SimMIM [4], training without labels.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32)
        >>> mask = torch.tensor([[True, False, False, True]])
        >>> ViTScratchForMaskedImageModeling(config)(torch.zeros(1, 3, 32, 32), mask).reconstruction.shape
        torch.Size([1, 3, 32, 32])
    """

    accepts_loss_kwargs = False  # as in the classifier
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^pre_logits\."]

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        if config.fc_norm:
            raise ValueError("fc_norm=True leaves the tokens that are decoded without their norm: use fc_norm=False.")
        self.vit = ViTScratchModel(config, use_mask_token=True)
        # One matrix product per patch. In a Sequential for transformers' parameter names.
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
        """Paint images, and compare the masked patches with the truth: the mean absolute error of their pixels.

        Args:
            pixel_values: (B, C, height, width), normalised by the image processor.
            bool_masked_pos: (B, rows * cols), True for the patches to hide and to paint. Without it there is no loss.
            kwargs: Any further argument of `ViTScratchModel.forward`.

        Raises:
            TypeError: The pixels are not floating point.
            ValueError: The pixels or a mask have the wrong shape.
        """
        outputs: BaseModelOutputWithPooling = self.vit(pixel_values, bool_masked_pos=bool_masked_pos, **kwargs)
        rows, cols = self.vit.embeddings.patch_embeddings.grid_size(pixel_values)
        patches = cast(Tensor, outputs.last_hidden_state)[:, self.config.num_prefix_tokens :]
        patches = self.decoder(
            patches.transpose(1, 2).unflatten(2, (rows, cols))
        )  # (B, C * height * width, rows, cols)
        patches = patches.unflatten(1, (self.config.num_channels, *self.config.patch_height_width))
        reconstruction = patches.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)  # (B, C, height, width)

        loss = None
        if bool_masked_pos is not None:
            dtype = torch.promote_types(reconstruction.dtype, torch.float32)
            error = F.l1_loss(reconstruction.to(dtype), pixel_values.to(dtype), reduction="none")
            mask = bool_masked_pos.to(dtype).unflatten(1, (1, rows, cols))
            for dim, pixels in zip((2, 3), self.config.patch_height_width, strict=True):
                mask = mask.repeat_interleave(pixels, dim=dim)  # -> (B, 1, height, width)
            # [4] section 3.4. A batch without a masked patch has a loss of zero.
            loss = (error * mask).sum() / mask.sum().clamp(min=1) / self.config.num_channels
        return MaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ViTScratchBackbone(BackboneMixin, ViTScratchModel):
    """The encoder as a source of feature maps, for models that detect or segment; `config.out_features` chooses them.

    Example:
        >>> config = ViTScratchConfig.from_variant("Ti/16", image_size=32, out_features=["stage6", "stage12"])
        >>> [tuple(maps.shape) for maps in ViTScratchBackbone(config)(torch.zeros(1, 3, 32, 64)).feature_maps]
        [(1, 192, 2, 4), (1, 192, 2, 4)]
    """

    def __init__(self, config: ViTScratchConfig):
        config.set_output_features_output_indices(config.out_features, None)  # a choice from here on
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """The patch tokens after each of the chosen stages, as maps.

        Each passes the final LayerNorm, as in DINOv2's backbone: the last stage's map is `last_hidden_state`.

        Args:
            pixel_values: (B, C, height, width), normalised by the image processor.
            kwargs: Any further argument of `ViTScratchModel.forward`.

        Raises:
            TypeError: The pixels are not floating point.
            ValueError: The pixels or a mask have the wrong shape.
        """
        outputs = ViTScratchModel.forward(self, pixel_values, return_dict=True, **kwargs)
        grid = self.embeddings.patch_embeddings.grid_size(pixel_values)
        feature_maps = []
        for stage, hidden_states in zip(self.stage_names, outputs.hidden_states, strict=True):
            if stage in self.out_features:
                normed = hidden_states if self.config.fc_norm else self.layernorm(hidden_states)
                patches = normed[:, self.config.num_prefix_tokens :]
                feature_maps.append(patches.transpose(1, 2).unflatten(2, grid))  # (B, D, rows, cols)
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "ViTScratchBackbone",
    "ViTScratchForImageClassification",
    "ViTScratchForMaskedImageModeling",
    "ViTScratchModel",
    "ViTScratchPreTrainedModel",
]
