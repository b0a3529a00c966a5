# %% [markdown]
# # 2. One attention head
#
# A transformer works on a list of vectors, called **tokens**. In a text, a token stands for a word or a part of a
# word. In an image, it stands for a small square. Stacked as rows, $N$ tokens of width $d$ form a matrix $X$ with $N$
# rows and $d$ columns.
#
# **Attention** lets each token collect something from the others. Each token asks a question, its *query*. It also has
# a label, its *key*, and some content to share, its *value*. All three are the token times a matrix:
#
# $$Q = X W_Q^\top \qquad K = X W_K^\top \qquad V = X W_V^\top$$
#
# A dot product compares query $i$ with key $j$. It is large if they point in the same direction. Softmax turns each
# row of these scores into shares. The output mixes the values in these shares:
#
# $$\mathrm{attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{a}}\right) V$$
#
# Here, $a$ is the width of the queries and keys. The dot product of two vectors of $a$ independent random numbers
# with mean 0 and variance 1 has mean 0 and standard deviation $\sqrt{a}$. Step 1 showed what large scores do.
# Dividing by $\sqrt{a}$ keeps the shares from being all or nothing at the start.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from sklearn.datasets import load_sample_image
from torch.nn import functional as F

from hf_vit_scratch.model import reference


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention_head(x, w_q, w_k, w_v):
    query, key, value = x @ w_q.T, x @ w_k.T, x @ w_v.T
    weights = softmax(query @ key.T / math.sqrt(query.shape[-1]))  # (N, N), each row adds up to 1
    return weights @ value, weights


# %% [markdown]
# That is all: five matrix products and a softmax. The result equals that of PyTorch's own function. We test it at the
# size of a well-known Vision Transformer, which has 197 tokens of width 768. One head turns them into queries, keys
# and values of width 64. The matrices are random.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((197, 768))
w_q, w_k, w_v = (rng.standard_normal((64, 768)) / math.sqrt(768) for _ in range(3))

output, weights = attention_head(x, w_q, w_k, w_v)

query, key, value = (torch.from_numpy(x @ w.T) for w in (w_q, w_k, w_v))
by_torch = F.scaled_dot_product_attention(query[None], key[None], value[None])[0].numpy()
difference = np.abs(output - by_torch).max()
print(f"output {output.shape}, weights {weights.shape}; largest difference from PyTorch: {difference:.0e}")
assert difference < 1e-12
assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
for ours, theirs in zip((output, weights), reference.attention_head(x, w_q, w_k, w_v), strict=True):
    assert np.abs(ours - theirs).max() < 1e-12

# %% [markdown]
# What does a head do with something real? We take a photograph and cut it into squares of 16 by 16 pixels. Each square
# is a token of width 3: its mean red, green and blue. We subtract the photograph's mean colour and make each vector
# one unit long. Dot products then compare directions only.

# %%
photograph = load_sample_image("flower.jpg")[:416] / 255  # (416, 640, 3), ships with scikit-learn
rows, cols = 416 // 16, 640 // 16
colours = photograph.reshape(rows, 16, cols, 16, 3).mean(axis=(1, 3)).reshape(-1, 3)  # one row for each square
x = colours - colours.mean(axis=0)
x = x / np.linalg.norm(x, axis=1, keepdims=True)
print(f"{rows} rows and {cols} columns of squares: {x.shape[0]} tokens of width {x.shape[1]}")

# %% [markdown]
# A trained network has learned its three matrices. Here, we choose them: the identity, multiplied by 5 for the queries
# and keys to make the shares sharp. So each square asks: which squares have a colour like mine?

# %%
output, weights = attention_head(x, w_q=5 * np.eye(3), w_k=5 * np.eye(3), w_v=np.eye(3))

print(f"each of {len(weights)} tokens has {weights.shape[1]} weights")
assert np.abs(weights - reference.attention_head(x, 5 * np.eye(3), 5 * np.eye(3), np.eye(3))[1]).max() < 1e-12

# %% [markdown]
# Each of the three maps below is one row of the weights, in the layout of the photograph. The square with the white
# frame asks. The brighter a square in the map, the more it takes from it.

# %% alt="A photograph of a flower, and for three of its squares a map that is bright where the colour is alike"
queries = {"from a petal": (11, 22), "from the leaves": (23, 6), "from the dark background": (4, 36)}
figure, panels = plt.subplots(2, 2, figsize=(6.4, 4.7), layout="constrained")
panels.flat[0].imshow(photograph, extent=(-0.5, cols - 0.5, rows - 0.5, -0.5))
panels.flat[0].set_title("the photograph")
for panel, (title, (row, col)) in zip(panels.flat[1:], queries.items(), strict=True):
    panel.imshow(weights[row * cols + col].reshape(rows, cols), cmap="viridis", vmin=0)
    panel.set_title(title)
    for axes in (panels.flat[0], panel):
        axes.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=2))
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# The head knows nothing about flowers, and yet each part of the picture finds similar parts. But this head can only
# ask about colour. Next come many heads, which ask different questions at the same time.
