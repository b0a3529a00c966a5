"""The mathematics of a Vision Transformer in NumPy and float64, written for reading; the oracle of the torch model.

One image or one sequence at a time, no batches, no training, no speed. Shapes: N tokens, d their width, a the width of
queries and keys, v the width of values, h heads (d, a and h are D, K and H in `modeling_vit_scratch.py`). Weights are
stored as torch stores them, (out, in), and a token is a row: y = x W^T + b.

[1] Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929.
[2] Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Head = tuple[Array, Array, Array]  # W_Q (a, d), W_K (a, d), W_V (v, d)
Block = tuple[Sequence[Head], Array, tuple[Array, ...]]  # the heads, W_O, and W_1, b_1, W_2, b_2 of a feed_forward


def softmax(scores: Array, axis: int = -1) -> Array:
    """exp(s_i) / sum_j exp(s_j) along an axis; any shape, kept.

    The maximum is taken off first, which changes nothing but keeps exp from overflowing.
    """
    exponentials = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)


def gelu(x: Array) -> Array:
    """Return x P(Z <= x) for a standard normal Z; Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415."""
    return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return x W^T + b.  (N, in), (out, in), (out,) -> (N, out)."""
    return x @ weight.T + (0 if bias is None else bias)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Bring each token to mean 0 and variance 1, then scale and shift it.  (N, d) -> (N, d).

    Ba et al. 2016, Layer Normalization, https://arxiv.org/abs/1607.06450, section 3.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered**2).mean(axis=-1, keepdims=True)
    return centered / np.sqrt(variance + eps) * weight + bias


def causal_mask(num_tokens: int) -> Array:
    """1 where token i may attend to token j, which is j <= i, else 0.  (N, N)."""
    return np.tril(np.ones((num_tokens, num_tokens)))


def attention(query: Array, key: Array, value: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """softmax(q k^T / sqrt(a)) v, [2] eq. 1.  (N, a), (N, a), (N, v) -> (N, v) and the weights (N, N).

    Row i of the weights says how much token i takes of each token. Where the 0/1 mask (N, N) is 0, the score becomes
    minus infinity, so the weight becomes 0; every row needs a 1.
    """
    scores = query @ key.T / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -np.inf, scores)
    weights = softmax(scores, axis=-1)  # over the keys: each token's weights sum to one
    return weights @ value, weights


def attention_head(x: Array, w_q: Array, w_k: Array, w_v: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """Compute one head without biases.  (N, d) -> (N, v) and the weights (N, N).

    W_Q and W_K (a, d). The values may be narrow, v = a, as in [2], or as wide as the tokens, v = d.
    """
    return attention(linear(x, w_q), linear(x, w_k), linear(x, w_v), mask)


def multi_head_attention(
    x: Array, heads: Sequence[Head], w_o: Array, mask: Array | None = None
) -> tuple[Array, Array]:
    """Put the heads' outputs side by side and project them back; [2] section 3.2.2.

    (N, d) and W_O (d, h v) -> (N, d) and weights (h, N, N).
    """
    outputs, weights = zip(*(attention_head(x, *head, mask) for head in heads), strict=True)
    return linear(np.concatenate(outputs, axis=-1), w_o), np.stack(weights)


def feed_forward(x: Array, w_1: Array, b_1: Array, w_2: Array, b_2: Array) -> Array:
    """max(0, x W_1^T + b_1) W_2^T + b_2, token by token; [2] eq. 2.  (N, d) -> (N, d)."""
    return linear(np.maximum(linear(x, w_1, b_1), 0), w_2, b_2)


def residual_stack(x: Array, blocks: Sequence[Block], mask: Array | None = None) -> tuple[Array, Array]:
    """Compute blocks in sequence: x + attention(x), then x + feed_forward(x), without norms.

    (N, d) -> (N, d) and all weights (blocks, h, N, N).
    """
    all_weights = []
    for heads, w_o, ffn in blocks:
        attended, weights = multi_head_attention(x, heads, w_o, mask)
        x = x + attended
        x = x + feed_forward(x, *ffn)
        all_weights.append(weights)
    return x, np.stack(all_weights)


def extract_patches(image: Array, patch_size: tuple[int, int]) -> Array:
    """Cut an image into a grid of patches, row by row, and flatten each.  (C, height, width) -> (rows * cols, C p q).

    The patch size is (p, q). Within a patch the channel varies slowest, then y, then x: the order of a convolution's
    weight.
    """
    channels, height, width = image.shape
    p, q = patch_size
    grid = image.reshape(channels, height // p, p, width // q, q)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * p * q)


def patch_embedding(image: Array, weight: Array, bias: Array) -> Array:
    """Project each flattened patch; [1] eq. 1, E.  (C, height, width) -> (rows * cols, d).

    `weight` (d, C, p, q) is that of the equal convolution with stride (p, q).
    """
    return linear(extract_patches(image, weight.shape[2:]), weight.reshape(len(weight), -1), bias)


def encoder_layer(
    x: Array, parameters: Mapping[str, Array], num_heads: int, norm_first: bool, eps: float, mask: Array | None = None
) -> tuple[Array, Array]:
    """Compute one encoder layer with biases and GELU.  (N, d) -> (N, d) and the weights (h, N, N).

    norm_first=True: x + f(LN(x)), [1] eq. 2 and 3; False: LN(x + f(x)), [2] section 3.1. The parameters have the names
    that they have within a layer of `ViTScratchModel`.
    """

    def projected(name: str, x: Array) -> Array:
        return linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    def norm(name: str, x: Array) -> Array:
        return layer_norm(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"], eps)

    def self_attention(x: Array) -> tuple[Array, Array]:
        heads = [np.split(projected(f"attention.{name}_proj", x), num_heads, axis=-1) for name in "qkv"]
        outputs, weights = zip(*(attention(q, k, v, mask) for q, k, v in zip(*heads, strict=True)), strict=True)
        return projected("attention.o_proj", np.concatenate(outputs, axis=-1)), np.stack(weights)

    def mlp(x: Array) -> Array:
        return projected("mlp.fc2", gelu(projected("mlp.fc1", x)))

    if norm_first:
        attended, weights = self_attention(norm("layernorm_before", x))
        x = x + attended
        return x + mlp(norm("layernorm_after", x)), weights
    attended, weights = self_attention(x)
    x = norm("layernorm_before", x + attended)
    return norm("layernorm_after", x + mlp(x)), weights


def vit(
    image: Array,
    parameters: Mapping[str, Array],
    *,
    num_layers: int,
    num_heads: int,
    norm_first: bool,
    eps: float,
    mask: Array | None = None,
) -> tuple[list[Array], Array, list[Array]]:
    """Run a whole forward pass, [1] eq. 1 to 4, with a class token and learned positions.

    `image` (C, height, width) is normalized, and of the size that the positions were made for. The parameters are
    those of a `ViTScratchModel` by name, `{name: x.numpy() for name, x in state_dict.items()}`. `mask` is the 0/1 mask
    (N, N) of `attention`.

    Returns:
        The embeddings and each layer's output, (N, d) each; the last hidden state (N, d), normalized; and each layer's
        attention weights (h, N, N).
    """
    projection = "embeddings.patch_embeddings.projection"
    patches = patch_embedding(image, parameters[f"{projection}.weight"], parameters[f"{projection}.bias"])
    tokens = np.concatenate((parameters["embeddings.cls_token"][0], patches))
    x = tokens + parameters["embeddings.position_embeddings"][0]
    if not norm_first:
        x = layer_norm(x, parameters["embeddings.layernorm.weight"], parameters["embeddings.layernorm.bias"], eps)

    hidden_states, all_weights = [x], []
    for index in range(num_layers):
        prefix = f"layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        x, weights = encoder_layer(x, layer, num_heads, norm_first, eps, mask)
        hidden_states.append(x)
        all_weights.append(weights)

    if norm_first:
        x = layer_norm(x, parameters["layernorm.weight"], parameters["layernorm.bias"], eps)
    return hidden_states, x, all_weights
