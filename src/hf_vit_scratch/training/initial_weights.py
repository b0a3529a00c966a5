"""First weights that know what images are like, not noise alone: whitened patches, and attention to near ones."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..model.modeling_vit_scratch import ViTScratchEmbeddings, ViTScratchPreTrainedModel

NUM_PATCHES = 64_000  # from which the covariance is estimated: a thousand images in 8 x 8 patches
LEAST_SHARE = 0.04  # of the mean variance, added to that of each direction, so that noise is not blown up
PEAK = 8.0  # logit of the place that a patch looks at, above the mean: 55% of the attention on 3x3 of 8x8 patches
PLACES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))  # a patch's own and its neighbors, (rows, columns)


@torch.no_grad()
def whiten_patches(model: ViTScratchPreTrainedModel, pixel_values: Tensor) -> None:
    """Draw the patch embedding's weights such that tokens vary alike in every direction that patches vary in.

    Neighboring pixels are nearly equal, so a random filter sees little but the mean colour of a patch. Whitening
    (Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images, appendix A: ZCA) makes all directions in
    the space of patches equally large, and random filters on whitened patches see edges and textures as well. As the
    first layer of a small network it was proposed, without being trained further, by Page 2019, How to Train Your
    ResNet, and Jordan 2024, https://arxiv.org/abs/2404.00498, section 3.2; here it is where training starts.

        W = R (S + e I)^(-1/2),  b = -W m,  R_ij ~ N(0, 1 / P)

    for the mean m and the covariance S of the patches, flattened to P numbers, of normalized pixels (B, C, height,
    width).
    """
    projection = cast(ViTScratchEmbeddings, model.base_model.embeddings).patch_embeddings.projection
    size = projection.weight.shape[2:]
    patches = F.unfold(pixel_values, size, stride=size).transpose(1, 2).flatten(0, 1).double()  # (patches, P)
    mean, length = patches.mean(dim=0), patches.shape[1]
    variances, directions = torch.linalg.eigh(patches.T.cov(correction=0))
    variances = variances.clamp(min=0) + LEAST_SHARE * variances.mean()
    whitening = directions * variances.rsqrt() @ directions.T  # symmetric
    random = torch.randn(len(projection.weight), length, dtype=torch.float64) / length**0.5
    weight = random.to(whitening.device) @ whitening
    projection.weight.copy_(weight.unflatten(1, projection.weight.shape[1:]))
    assert projection.bias is not None
    projection.bias.copy_(-weight @ mean)


@torch.no_grad()
def start_local_attention(model: ViTScratchPreTrainedModel) -> None:
    """Bias queries and keys such that the first half of the heads, in all layers but the last, looks at near patches.

    A rotary pair j turns by w_j per coordinate, so with constant queries and keys a logit depends on the distance
    alone. The query bias (a, 0) and the key bias (a cos(w_j d), -a sin(w_j d)) make it largest at the distance d. With
    a = sqrt(2 g / sqrt(K)) the largest logit is g. The idea is that of d'Ascoli et al. 2021
    (https://arxiv.org/abs/2103.10697): heads start as a convolution, and are free to leave it.
    """
    config = model.config
    if config.position_embedding_type != "rope2d" or not config.qkv_bias or config.qk_norm:
        raise UserError(
            "local_attention needs a model with position_embedding_type rope2d, qkv_bias and without qk_norm. Change "
            "these, or give --local_attention false."
        )
    head_dim, (rows, cols) = config.hidden_size // config.num_attention_heads, config.grid_size
    frequencies = 2 * math.pi / 100.0 ** (torch.arange(head_dim // 4) * (4 / head_dim))  # as `rope2d_cos_sin`
    size = math.sqrt(2 * PEAK / math.sqrt(head_dim))
    layers: Any = model.base_model.layers
    for number, layer in enumerate(layers[:-1]):
        attention = layer.attention
        for head in range(config.num_attention_heads // 2):
            down, right = PLACES[(number + head) % len(PLACES)]
            angles = torch.cat((frequencies * down * 2 / rows, frequencies * right * 2 / cols))  # (K / 2,)
            channels = slice(head * head_dim, (head + 1) * head_dim)
            attention.q_proj.bias[channels] = torch.cat((torch.ones_like(angles), torch.zeros_like(angles))) * size
            attention.k_proj.bias[channels] = torch.cat((angles.cos(), -angles.sin())) * size
