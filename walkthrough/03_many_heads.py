# %% [markdown]
# # 3. Many heads
#
# One head asks one question. A transformer has several heads side by side, each with its own matrices. This is called
# **multi-head attention**. The outputs of the $h$ heads are concatenated and multiplied by one more matrix, $W_O$. It
# mixes them back to the width of the tokens:
#
# $$\mathrm{MultiHead}(X) = [\mathrm{head}_1, \dots, \mathrm{head}_h] \, W_O^\top$$
#
# A loop over the heads would work. To compute all heads at once, we stack their matrices into arrays with one more
# axis, and name the axes: `n` and `m` for tokens, `d` for the width of a token, `h` for heads, `a` for the width of
# queries and keys, and `v` for the width of values. `einsum` multiplies the arrays. It sums over each letter that is
# missing on the right of the arrow.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from sklearn.datasets import load_sample_image
from torch import nn

from hf_vit_scratch.model import reference


def multi_head_attention(x, w_q, w_k, w_v, w_o):
    query = np.einsum("nd,had->hna", x, w_q)
    key = np.einsum("nd,had->hna", x, w_k)
    value = np.einsum("nd,hvd->hnv", x, w_v)
    scores = np.einsum("hna,hma->hnm", query, key) / math.sqrt(query.shape[-1])
    weights = reference.softmax(scores)  # as in step 1
    context = np.einsum("hnm,hmv->hnv", weights, value)
    return np.einsum("hnv,dhv->nd", context, w_o), weights


# %% [markdown]
# With 12 heads of width 64 on tokens of width 768, the output and the weights of every head equal those of PyTorch's
# `nn.MultiheadAttention`. PyTorch stacks the matrices of all heads as rows, so a `reshape` is enough to use the same
# numbers. The result also equals a loop over the heads of step 2.

# %%
torch.manual_seed(0)
theirs = nn.MultiheadAttention(embed_dim=768, num_heads=12, bias=False, batch_first=True, dtype=torch.float64)
w_q, w_k, w_v = (w.reshape(12, 64, 768) for w in theirs.in_proj_weight.detach().numpy().reshape(3, 768, 768))
w_o = theirs.out_proj.weight.detach().numpy()
x = torch.randn(1, 197, 768, dtype=torch.float64)

output, weights = multi_head_attention(x[0].numpy(), w_q, w_k, w_v, w_o.reshape(768, 12, 64))

with torch.no_grad():
    by_torch, weights_by_torch = theirs(x, x, x, average_attn_weights=False)
by_loop, weights_by_loop = reference.multi_head_attention(x[0].numpy(), list(zip(w_q, w_k, w_v, strict=True)), w_o)
for name, ours, others in (
    ("output", output, (by_torch[0].numpy(), by_loop)),
    ("weights", weights, (weights_by_torch[0].numpy(), weights_by_loop)),
):
    differences = [np.abs(ours - other).max() for other in others]
    print(
        f"{name} {ours.shape}: largest difference from PyTorch {differences[0]:.0e}, "
        f"from the loop {differences[1]:.0e}"
    )
    assert max(differences) < 1e-12

# %% [markdown]
# We return to the photograph. Now the token of each square describes its colour, as before, and its place. The place
# is given by two angles. One grows from left to right, and the other from top to bottom. The token holds the sine and
# cosine of each. Two such pairs have a large dot product if the angles are close:
#
# $$\sin(\alpha) \sin(\beta) + \cos(\alpha) \cos(\beta) = \cos(\alpha - \beta)$$

# %%
photograph = load_sample_image("flower.jpg")[:416] / 255
rows, cols = 416 // 16, 640 // 16
colours = photograph.reshape(rows, 16, cols, 16, 3).mean(axis=(1, 3)).reshape(-1, 3)
colours = colours - colours.mean(axis=0)
colours = colours / np.linalg.norm(colours, axis=1, keepdims=True)
y, x = (angle.ravel() for angle in np.meshgrid(np.linspace(0, 2, rows), np.linspace(0, 3, cols), indexing="ij"))
tokens = np.column_stack((colours, np.sin(y), np.cos(y), np.sin(x), np.cos(x)))  # width 3 + 2 + 2

# %% [markdown]
# The three heads get different matrices. Each matrix keeps some columns of the token and sets the others to 0. This
# determines what the head asks about: the colour, the place, or the row alone. The values are the complete tokens.
# $W_O$ takes the mean of the three heads.

# %%
keeps = np.array([[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0]])
w_q = w_k = np.stack([6 * np.diag(kept) for kept in keeps]).astype(float)  # (3 heads, 7, 7)
w_v = np.stack([np.eye(7)] * 3)
w_o = np.hstack([np.eye(7)] * 3) / 3

output, weights = multi_head_attention(tokens, w_q, w_k, w_v, w_o.reshape(7, 3, 7))

by_loop, _ = reference.multi_head_attention(tokens, list(zip(w_q, w_k, w_v, strict=True)), w_o)
print(f"weights {weights.shape}; largest difference from the loop: {np.abs(output - by_loop).max():.0e}")
assert np.abs(output - by_loop).max() < 1e-12

# %% alt="A flower with one square marked, and three maps: bright at like colours, nearby, and in the same row"
row, col = 11, 22
figure, panels = plt.subplots(2, 2, figsize=(6.4, 4.7), layout="constrained")
panels.flat[0].imshow(photograph, extent=(-0.5, cols - 0.5, rows - 0.5, -0.5))
panels.flat[0].set_title("who is like the white square?")
titles = ("head 1: in its colour", "head 2: in its place", "head 3: in its row")
for panel, title, head in zip(panels.flat[1:], titles, weights, strict=True):
    panel.imshow(head[row * cols + col].reshape(rows, cols), cmap="viridis", vmin=0)
    panel.set_title(title)
for panel in panels.flat:
    panel.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=2))
    panel.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# The same square asks three questions and gets three answers. A trained network finds its own questions, 12 in each
# layer at the usual size. Next, we prevent a token from looking at some of the others.
