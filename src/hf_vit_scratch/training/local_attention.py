"""Attention that starts local in half of the heads, where random weights let every patch look everywhere."""

import math
from typing import Any

import torch

from ..errors import UserError
from ..model.modeling_vit_scratch import ViTScratchPreTrainedModel

PEAK = 8.0  # logit of the place that a patch looks at, above the mean: 55% of the attention on 3x3 of 8x8 patches
PLACES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))  # a patch's own and its neighbors, (rows, columns)


@torch.no_grad()
def start_local_attention(model: ViTScratchPreTrainedModel) -> None:
    """Bias queries and keys such that the first half of the heads, in all layers but the last, looks at near patches.

    A rotary pair j turns by w_j per coordinate, so with constant queries and keys a logit depends on the distance
    alone. The query bias (a, 0) and the key bias (a cos(w_j d), -a sin(w_j d)) make it largest at the distance d. With
    a = sqrt(2 g / sqrt(K)) the largest logit is g. The idea is that of d'Ascoli et al. 2021
    (https://arxiv.org/abs/2103.10697): heads start as a convolution, and are free to leave it.

    Raises:
        UserError: The model has no rotary positions or no biases to start from, or normalizes queries and keys.
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
