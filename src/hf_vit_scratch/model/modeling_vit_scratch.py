"""A Vision Transformer [1] as a Hugging Face `PreTrainedModel`, to be read from top to bottom.

    pixels -> patches -> + class token, + positions -> L encoder layers -> pooled token -> logits -> loss

Shapes: B images, C channels, rows x cols patches, N tokens (the class token, if any, and the patches), D hidden_size,
H attention heads, K = D // H, L num_labels.

[1] Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929, equations (1) to (4).
[2] Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762.
[3] Devlin et al. 2019, BERT, https://arxiv.org/abs/1810.04805.
[4] Xie et al. 2022, SimMIM, https://arxiv.org/abs/2111.09886.
"""

import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, cast

import torch
from huggingface_hub import ModelCardData
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
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
from transformers.utils import (
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    TransformersKwargs,
    cached_file,
    is_peft_available,
    logging,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_vit_scratch import ViTScratchConfig

logger = logging.get_logger(__name__)

CARD = """---
{metadata}
---

# {repo_id}

A Vision Transformer of `hf_vit_scratch`. It loads with
`AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)`, or after
`import hf_vit_scratch` without that argument.
"""


CHECKSUMS = "SHA256SUMS"  # `sha256sum --check SHA256SUMS` verifies a folder, too
TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")  # of what somebody might load
WEIGHTS = "model*.safetensors"  # not those that others may put beside them, as peft does


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Write the SHA-256 of files, by their names, into `folder`, in the format of the program sha256sum."""
    lines = []
    for file in sorted(file for file in files if file.name != CHECKSUMS):
        with file.open("rb") as content:
            lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {file.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def damaged_files(folder: Path, pattern: str = "*") -> list[str]:
    """The files of `folder` that are not as they were saved: changed, missing, or tensors unknown to its checksums.

    None where it has no checksums: it was saved by something else, or long ago.

    Args:
        folder: Of a saved model, or a checkpoint.
        pattern: Of the names that count.
    """
    if not (folder / CHECKSUMS).is_file():
        return []
    try:
        lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return [CHECKSUMS]
    if not all(re.fullmatch(r"[0-9a-f]{64}  [^/]+", line) for line in lines):
        return [CHECKSUMS]
    wanted = {line[66:]: line[:64] for line in lines if Path(line[66:]).match(pattern)}
    present = {file.name: file for file in folder.glob(pattern) if file.is_file() and file.name != CHECKSUMS}
    unknown = {name for name in present.keys() - wanted.keys() if Path(name).suffix in TENSOR_SUFFIXES}
    damaged = (wanted.keys() - present.keys()) | unknown
    for name in wanted.keys() & present.keys():
        with present[name].open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != wanted[name]:
                damaged.add(name)
    return sorted(damaged)


def _weights(file_name: str) -> str:
    """Which weights a file belongs to, whole or one of several: `model`, or of a variant such as `model.fp16`."""
    return re.sub(r"(-\d+-of-\d+)?\.safetensors$", "", file_name)


def _refuse_untrusted_weights(folder: Path, variant: str | None = None) -> None:
    pickles = sorted(file.name for file in folder.glob("*.bin") if file.name != "training_args.bin")
    if pickles and not any(folder.glob("*.safetensors")):
        raise OSError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded. Only "
            "safetensors are: ask whoever saved them for those."
        )
    read = (CHECKSUMS, f"model.{variant}" if variant else "model")  # others may lie beside them
    damaged = [name for name in damaged_files(folder, WEIGHTS) if (folder / name).exists() and _weights(name) in read]
    if damaged:
        raise OSError(
            f"{folder} is damaged: {', '.join(damaged)} cannot be trusted, says {CHECKSUMS}. Get the folder anew; if "
            f"you have changed the weights on purpose, delete {CHECKSUMS}."
        )


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
    probs = scores.softmax(dim=-1).to(query.dtype)
    probs = F.dropout(probs, p=dropout, training=module.training)
    return (probs @ value).transpose(1, 2), probs


def resample_positions(positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Resample the position embeddings of the patches to another grid, bicubically; [1] section 3.2.

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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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

    def grid_size(self, pixel_values: Tensor) -> tuple[int, int]:
        """Number of patches along the height and the width of these images, after checking that they can be cut.

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
        return height // patch_height, width // patch_width

    def forward(self, pixel_values: Tensor) -> Tensor:
        # Pixels come from the image processor in float32; the weights may be in half precision.
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)


class ViTScratchEmbeddings(nn.Module):
    """Patches, the class token before them, and positions; [1] eq. 1.  (B, C, height, width) -> (B, N, D).

    Masked patches, True in (B, rows * cols), are replaced by the mask token; [4] section 3.2. In the BERT style a
    LayerNorm follows ([3], as published in code). An image of another size than `image_size` gets its positions
    resampled.
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

    def forward(self, pixel_values: Tensor, grid: tuple[int, int], bool_masked_pos: Tensor | None = None) -> Tensor:
        embeddings = self.patch_embeddings(pixel_values)
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
        embeddings = embeddings + resample_positions(self.position_embeddings, self.config.grid_size, grid)
        return self.dropout(self.layernorm(embeddings))


class ViTScratchRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight follows the dtype of its input, which torch's fused kernel needs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# Multiplications in a linear layer from which on it is faster to call oneDNN: its product, which has no gradients, and
# its convolution, which has. On a CPU torch multiplies float32 through Intel's MKL, which on AMD's processors is the
# slower library; bfloat16 goes through oneDNN, but the bias is first copied into every row of the result, where oneDNN
# could add it on the way. From these numbers on a layer so takes 0.7 to 1.0 of the time in float32 and 0.8 to 1.06 in
# bfloat16, below up to twice the time: widths 64 to 768, 65 to 8,320 tokens, forward and backward, two cores of an AMD
# Zen 4, torch 2.15. Without gradients, too, the convolution is the faster of the two there: a whole model takes 0.93
# to 1.02 of the time that it takes with the product.
MULTIPLICATIONS_FOR_ONEDNN = {torch.float32: (2**24, 2**26), torch.bfloat16: (0, 2**28)}
# And for the convolution, tokens of all images together: with fewer, wide layers took up to 1.25 times the time.
TOKENS_FOR_CONVOLUTION = 1536


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this is a processor on which that was measured: AMD's, from Zen 4 on.

    On a Zen 3, which has no AVX-512, MKL is the faster library: oneDNN's product takes 0.97 to 1.36 of its time, the
    convolution 0.95 to 1.67, and 1.02 to 1.68 with gradients (widths 192 to 768, 65 to 4,160 tokens, two cores, torch
    2.14).
    """
    capabilities = torch.cpu.get_capabilities()
    is_amd = "AMD" in str(capabilities.get("cpu_name"))
    return torch.backends.mkldnn.is_available() and is_amd and bool(capabilities.get("avx512_bf16"))


def product_dtype(x: Tensor) -> torch.dtype:
    """In which a linear layer multiplies `x`, a tensor on a CPU."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def only_result_is_wanted() -> bool:
    """Whether no gradient, cast or count of what happens is asked for."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def are_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can have these factors: none is distributed, quantized or sparse."""
    return type(x) is Tensor and type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided


class ViTScratchLinear(nn.Linear):
    """`nn.Linear`, faster on a CPU; the results differ by rounding.  (B, N, in_features) -> (B, N, out_features).

    Compiled, in bfloat16, the bias is an addition of its own: torch's compiler fuses it with what follows. On an AMD
    Zen 4 a compiled model so takes 0.89 to 0.96 of the time for images in batches, and 0.94 for a training step of
    32x32; in float32 it would take up to 1.05.

    Not compiled, it calls oneDNN where that is faster, unless `torch.backends.mkldnn.enabled` is False.
    """

    def forward(self, x: Tensor) -> Tensor:
        # What costs least is asked first: to ask everything 72 times took 2% of the time of a single small image.
        if torch.compiler.is_compiling():
            bias_apart = torch.compiler.is_dynamo_compiling() and x.is_cpu and product_dtype(x) == torch.bfloat16
            if bias_apart and self.bias is not None:
                product = F.linear(x, self.weight)
                return product + self.bias.to(product.dtype)
        elif x.is_cpu and onednn_is_faster() and not torch.jit.is_tracing():
            return self.forward_by_onednn(x)
        return F.linear(x, self.weight, self.bias)

    def forward_by_onednn(self, x: Tensor) -> Tensor:
        """The same, by oneDNN where it can be called and is the faster library for so much work."""
        weight, bias = self.weight, self.bias
        multiplications = x.numel() * self.out_features
        for_product, for_convolution = MULTIPLICATIONS_FOR_ONEDNN.get(product_dtype(x), (math.inf, math.inf))
        if multiplications >= for_product and are_plain(x, weight) and torch.backends.mkldnn.enabled:
            if multiplications >= for_convolution and x.ndim == 3 and len(x) * x.shape[1] >= TOKENS_FOR_CONVOLUTION:
                # torch gives convolutions to oneDNN, with their gradients. This one sees an image one token high and
                # N wide, one pixel at a time.
                image = x.transpose(1, 2).unsqueeze(2)  # (B, in_features, 1, N)
                return F.conv2d(image, weight[:, :, None, None], bias).squeeze(2).transpose(1, 2)
            if x.dtype == weight.dtype and only_result_is_wanted():
                # The compiler's own call of oneDNN. No gradient is defined for it.
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)


class ViTScratchAttention(nn.Module):
    """Multi-head self-attention: every token takes a weighted mean of all; [1] appendix A.  (B, N, D) -> (B, N, D)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads  # the config guarantees no remainder
        self.dropout_prob = config.attention_probs_dropout_prob
        self.is_causal = config.is_causal  # read by the sdpa and flash backends, which take a missing one for True
        self.num_key_value_groups = 1  # likewise; to look for a missing one takes Python longer
        self.q_proj = ViTScratchLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = ViTScratchLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = ViTScratchLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = ViTScratchLinear(config.hidden_size, config.hidden_size)
        # Henry et al. 2020, https://arxiv.org/abs/2010.04245, with RMSNorm: the scores cannot grow without bound.
        self.q_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = ViTScratchRMSNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # (B, N, H, K)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)  # (B, H, N, K)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)

        attention_interface: Callable = eager_attention_forward
        if not output_attentions:  # only the attention written out has its probabilities to give
            attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
        context, probs = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.head_dim**-0.5,
            dropout=self.dropout_prob if self.training else 0.0,
            **kwargs,
        )  # (B, N, H, K)
        return self.o_proj(context.flatten(2)), probs


class ViTScratchMLP(nn.Module):
    """Two linear layers with an activation between them, token by token; [1] section 3.1.  (B, N, D) -> (B, N, D)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.fc1 = ViTScratchLinear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = ViTScratchLinear(config.intermediate_size, config.hidden_size)

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
            branch, probs = self.attention(self.layernorm_before(x), attention_mask, **kwargs)
            x = x + self.regularise(branch)
            branch = self.mlp(self.layernorm_after(x))
            x = x + self.regularise(branch)
        else:
            branch, probs = self.attention(x, attention_mask, **kwargs)
            x = self.layernorm_before(x + self.regularise(branch))
            branch = self.mlp(x)
            x = self.layernorm_after(x + self.regularise(branch))
        return x, probs

    def regularise(self, branch: Tensor) -> Tensor:
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
        """Load a saved model, as in transformers; with another `image_size` its positions are resampled.

        Args:
            pretrained_model_name_or_path: Folder, or name on the Hub.
            model_args: Passed on to transformers.
            config: A configuration instead of the saved one.
            kwargs: Any argument of transformers' own `from_pretrained`, or a field of the configuration to change.

        Raises:
            OSError: The weights are not those that were saved, or are a pickle, which could run code: only safetensors
                are loaded.

        Example:
            `ViTScratchModel.from_pretrained(folder, image_size=[256, 320])`
        """
        kwargs["use_safetensors"] = True
        if pretrained_model_name_or_path is None:  # the weights are an argument
            return super().from_pretrained(None, *model_args, config=config, **kwargs)
        folder = Path(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
        variant = kwargs.get("variant")
        if folder.is_dir():
            _refuse_untrusted_weights(folder, variant)
        hub_names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub_kwargs = {name: kwargs[name] for name in hub_names if name in kwargs}

        # transformers compares the shapes of all tensors with the file's, so load with the saved number of patches,
        # then change it.
        wanted_size = kwargs.get("image_size") if config is None else getattr(config, "image_size", None)
        if wanted_size is not None:
            saved = cls._saved_config(pretrained_model_name_or_path, hub_kwargs)
            wanted = copy.deepcopy(saved if config is None else config)
            if config is None:
                wanted.image_size = wanted_size
                wanted.patch_size = kwargs.get("patch_size", saved.patch_size)
            wanted.validate()
            (rows, cols), (height, width) = saved.grid_size, wanted.patch_height_width
            if wanted.grid_size == saved.grid_size:
                wanted_size = None
            elif config is None:
                kwargs["image_size"] = [rows * height, cols * width]
            else:
                config = wanted
                config.image_size = [rows * height, cols * width]
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        if wanted_size is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
            model.set_image_size(wanted_size)

        if not folder.is_dir():  # only now the files are on this machine
            checksums = cached_file(
                pretrained_model_name_or_path,
                CHECKSUMS,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                **hub_kwargs,
            )
            if checksums is not None:
                _refuse_untrusted_weights(Path(checksums).parent, variant)
        return loaded

    @classmethod
    def _saved_config(cls, name_or_path: Any, hub_kwargs: dict[str, Any]) -> Any:
        """The configuration in a folder or repository; where that holds an adapter, the one of the adapter's model."""
        # As transformers decides it: a folder that holds a model, too, is that model's.
        has_model = Path(str(name_or_path), hub_kwargs.get("subfolder") or "", CONFIG_NAME).is_file()
        look = is_peft_available() and not has_model
        if look and (adapter := find_adapter_config_file(name_or_path, **hub_kwargs)):
            name_or_path = json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]
            hub_kwargs = {name: hub_kwargs[name] for name in hub_kwargs.keys() - {"revision", "subfolder"}}
        return cls.config_class.from_pretrained(name_or_path, **hub_kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save the model, as in transformers, with the checksums of its weights, which are verified at loading.

        Args:
            save_directory: The folder; it is made.
            is_main_process: Whether this process is the one that writes.
            args: As in transformers.
            kwargs: As in transformers.
        """
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            write_checksums(Path(save_directory), Path(save_directory).glob(WEIGHTS))

    def _upload_modified_files(
        self,
        working_dir: str | os.PathLike,
        repo_id: str,
        files_timestamps: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make a push complete: `push_to_hub` calls this with the folder that it will upload.

        The image processor is that of the folder or repository from which the model was loaded; one that was made in
        memory has none. The stock card, which asks for more information in every section, becomes a short one.
        """
        folder, source = Path(working_dir), None
        write_checksums(folder, folder.glob(WEIGHTS))  # `save_pretrained(push_to_hub=True)` is not there yet
        pushed = {_weights(file.name) for file in folder.glob(WEIGHTS)}
        with contextlib.suppress(OSError):  # there may be none yet
            there = cached_file(repo_id, CHECKSUMS, token=kwargs.get("token"), revision=kwargs.get("revision"))
            lines = Path(cast(str, there)).read_text(encoding="utf-8").splitlines(keepends=True)
            with (folder / CHECKSUMS).open("a", encoding="utf-8") as file:  # of weights that stay: another variant's
                file.writelines(line for line in lines if _weights(line[66:].strip()) not in pushed)
        files_timestamps.pop(CHECKSUMS, None)
        with contextlib.suppress(OSError):  # the folder may be gone, the repository out of reach
            source = cached_file(str(self.config.name_or_path), IMAGE_PROCESSOR_NAME, token=kwargs.get("token"))
        if source and not (folder / IMAGE_PROCESSOR_NAME).exists():
            shutil.copy(source, folder / IMAGE_PROCESSOR_NAME)
        card = folder / "README.md"
        if card.is_file() and "[More Information Needed]" in card.read_text(encoding="utf-8"):
            data = ModelCardData(library_name="transformers", tags=["vision", "vit"])
            card.write_text(CARD.format(metadata=data.to_yaml(), repo_id=repo_id), encoding="utf-8")
        files_timestamps.pop(IMAGE_PROCESSOR_NAME, None)  # upload it although saving the model has not changed it
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)

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
        positions = resample_positions(embeddings.position_embeddings, self.config.grid_size, new_config.grid_size)
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

        grid = self.embeddings.patch_embeddings.grid_size(pixel_values)
        hidden_states = self.embeddings(pixel_values, grid, bool_masked_pos)
        rotary = None
        if self.config.position_embedding_type == "rope2d":
            head_dim = self.config.hidden_size // self.config.num_attention_heads
            rotary = rope2d_cos_sin(grid, head_dim, self.config.num_prefix_tokens, like=hidden_states)
        mask = self._attention_scores_mask(hidden_states, attention_mask, eager=output_attentions)

        all_hidden_states, all_attentions = [hidden_states], []
        for layer in self.layers:
            hidden_states, probs = layer(
                hidden_states, mask, rotary=rotary, output_attentions=output_attentions, **kwargs
            )
            if output_hidden_states:  # a reference would keep its memory
                all_hidden_states.append(hidden_states)
            if output_attentions:
                all_attentions.append(probs)

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
