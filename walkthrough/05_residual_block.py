# %% [markdown]
# # 5. The residual block
#
# Attention moves information between tokens, but it only mixes. A small network then *works* on what each token has
# collected. It treats every token separately and in the same way. It has a linear map to a larger width, ReLU (which
# replaces negative numbers by 0), and a linear map back. It is called the **feed-forward network**:
#
# $$\mathrm{ffn}(x) = \max(0, \; x W_1^\top + b_1) \, W_2^\top + b_2$$
#
# Neither attention nor this network replaces the tokens. Their outputs are *added* to the tokens. This is called a
# **residual connection**:
#
# $$x \leftarrow x + \mathrm{attention}(x) \qquad\qquad x \leftarrow x + \mathrm{ffn}(x)$$
#
# These two lines are one block. A transformer is a stack of such blocks.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LogNorm
from torch import nn

from hf_vit_scratch.model import reference


def residual_block(x, heads, w_o, ffn):
    w_1, b_1, w_2, b_2 = ffn
    x = x + reference.multi_head_attention(x, heads, w_o)[0]  # as in step 3
    return x + np.maximum(x @ w_1.T + b_1, 0) @ w_2.T + b_2


# %% [markdown]
# ## Matrices and PyTorch, side by side
#
# So far, we have used matrices alone. A deep learning library has the same parts under its own names:
#
# | with matrices | in PyTorch |
# | --- | --- |
# | `softmax(scores)` | `scores.softmax(dim=-1)` |
# | `softmax(q @ k.T / sqrt(a)) @ v` | `F.scaled_dot_product_attention(q, k, v)` |
# | heads with `w_q`, `w_k`, `w_v`, and `w_o` | `nn.MultiheadAttention(d, h, bias=False)` |
# | `np.where(mask == 0, -inf, scores)` | `attn_mask`, `is_causal=True` |
# | `x @ w_1.T + b_1` | `nn.Linear(d, width)` |
# | `np.maximum(x, 0)` | `nn.ReLU()` |
# | `x + ...` | `x + ...` |
#
# This is the block in PyTorch:


# %%
class ResidualBlock(nn.Module):
    def __init__(self, d, num_heads, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, num_heads, bias=False, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, d))

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.ffn(x)


# %% [markdown]
# We compare six blocks on 24 tokens of width 32. Every matrix and bias holds random numbers, the same in both
# versions:

# %%
torch.manual_seed(0)
d, num_heads = 32, 4
network = nn.Sequential(*(ResidualBlock(d, num_heads, width=64) for _ in range(6))).double()
with torch.no_grad():
    for parameter in network.parameters():
        parameter.normal_(std=0.1)


def as_matrices(block):
    heads = list(zip(*block.attention.in_proj_weight.detach().numpy().reshape(3, num_heads, -1, d), strict=True))
    ffn = [parameter.detach().numpy() for parameter in block.ffn.parameters()]
    return heads, block.attention.out_proj.weight.detach().numpy(), ffn


tokens = torch.randn(24, d, dtype=torch.float64)
with torch.no_grad():
    by_torch = network(tokens[None])[0].numpy()
by_matrices = tokens.numpy()
for block in network:
    by_matrices = residual_block(by_matrices, *as_matrices(block))

difference = np.abs(by_matrices - by_torch)
print(f"entries up to {np.abs(by_torch).max():.1f}; largest difference: {difference.max():.0e}")
assert difference.max() < 1e-13
by_reference, _ = reference.residual_stack(tokens.numpy(), [as_matrices(block) for block in network])
assert np.abs(by_matrices - by_reference).max() < 1e-13

# %% alt="Two identical heat maps of token entries, by matrices and by PyTorch, and a map of their tiny differences"
figure, panels = plt.subplots(1, 3, figsize=(6.4, 2.5), layout="constrained")
limit = np.abs(by_torch).max()
for panel, title, output in zip(panels, ("by matrices", "by PyTorch"), (by_matrices, by_torch), strict=False):
    shown = panel.imshow(output, cmap="cividis", vmin=-limit, vmax=limit)
    panel.set_title(title)
    figure.colorbar(shown, ax=panel, orientation="horizontal", label="entry of a token", ticks=(-4, 0, 4))
panels[2].set_facecolor("black")  # exactly equal
shown = panels[2].imshow(np.where(difference == 0, np.nan, difference), cmap="viridis", norm=LogNorm(1e-17, 1e-14))
panels[2].set_title("difference")
figure.colorbar(shown, ax=panels[2], orientation="horizontal", label="black: none", ticks=(1e-17, 1e-16, 1e-15, 1e-14))
for panel in panels:
    panel.set(xticks=[], yticks=[])
panels[0].set_ylabel("24 tokens")
plt.show()

# %% [markdown]
# The remaining difference is rounding: a 64-bit number has about 16 digits, and the two versions add in a different
# order.
#
# ## Why add?
#
# What if each block replaced the tokens instead of adding to them? Attention takes means, and a mean of means of
# means is nearly the same for all tokens. We measure how similar the tokens are by the mean cosine of the angle
# between two of them: 0 for unrelated tokens, 1 for the same direction. The matrices are random. Relative to the
# width, they are about as large as at the start of the training of a Vision Transformer.


# %%
def likeness(x):
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return (x @ x.T)[np.triu_indices(len(x), 1)].mean()


rng = np.random.default_rng(0)
curves = {"added": [], "replaced": []}
for kind, curve in curves.items():
    x = rng.standard_normal((24, d))
    curve.append(likeness(x))
    for _ in range(12):
        heads = [tuple(0.5 * rng.standard_normal((3, 8, d)) / math.sqrt(d)) for _ in range(num_heads)]
        w_o = 0.5 * rng.standard_normal((d, d)) / math.sqrt(d)
        attended = reference.multi_head_attention(x, heads, w_o)[0]
        x = x + attended if kind == "added" else attended
        x = x / np.sqrt((x**2).mean())  # one factor for all tokens, which keeps the numbers from growing or vanishing
        curve.append(likeness(x))

print(f"after 12 layers of attention: {curves['added'][-1]:.2f} added, {curves['replaced'][-1]:.4f} replaced")
assert curves["replaced"][-1] > 0.99 > 0.7 > curves["added"][-1]

# %% alt="Likeness of the tokens over 12 layers: 1 at once where attention replaces, low where it is added"
figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
for (kind, curve), colour, offset in zip(curves.items(), ("#0072b2", "#d55e00"), (0.05, -0.11), strict=True):
    axes.plot(curve, marker="o", color=colour)
    axes.text(12, curve[-1] + offset, kind, color=colour, ha="right", fontsize=11)
axes.set(xlabel="layers of attention", ylabel="likeness of the tokens", ylim=(-0.08, 1.08), xticks=range(0, 13, 2))
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Without the addition, the first layers make all tokens the same, and their differences are lost. With it, the tokens
# become similar only slowly. Each token keeps its content and adds something new in each layer. Next, we leave toy
# tokens and ask: how does an image become tokens?
