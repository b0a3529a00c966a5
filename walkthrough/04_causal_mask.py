# %% [markdown]
# # 4. The causal mask
#
# So far, every token looks at every token. A program that continues a text must not do this. While it learns to
# predict the next word, it must not see that word. So token $i$ may only look at the tokens $j \le i$: at itself and
# at earlier ones.
#
# The **causal mask** expresses this rule as a matrix of ones (allowed) and zeros (forbidden). Where it is 0, the score
# becomes minus infinity before the softmax. Since $e^{-\infty} = 0$, the share is exactly 0. The other shares still
# add up to 1.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from sklearn.datasets import load_sample_image
from torch import nn
from torch.nn import functional as F

from hf_vit_scratch.model import reference


def masked_attention(query, key, value, mask):
    scores = query @ key.T / math.sqrt(query.shape[-1])
    weights = reference.softmax(np.where(mask == 0, -np.inf, scores))
    return weights @ value, weights


mask = np.tril(np.ones((5, 5)))  # the lower triangle
print(mask.astype(int))
assert (mask == reference.causal_mask(5)).all()

# %% [markdown]
# PyTorch takes this mask as a flag, or as a matrix that is added to the scores (0 where allowed, minus infinity where
# not). `nn.MultiheadAttention` takes the matrix, too. All of them equal ours.

# %%
rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 50, 64))
mask = np.tril(np.ones((50, 50)))

output, weights = masked_attention(query, key, value, mask)

added = torch.zeros(50, 50, dtype=torch.float64).masked_fill(torch.from_numpy(mask == 0), -math.inf)
q, k, v = (torch.from_numpy(array)[None] for array in (query, key, value))
by_flag = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].numpy()
by_addition = F.scaled_dot_product_attention(q, k, v, attn_mask=added)[0].numpy()
difference = max(np.abs(output - by_flag).max(), np.abs(output - by_addition).max())
print(f"one head: largest difference from PyTorch {difference:.0e}")
assert difference < 1e-12
assert (np.triu(weights, 1) == 0).all()  # nothing above the diagonal

torch.manual_seed(0)
theirs = nn.MultiheadAttention(embed_dim=64, num_heads=4, bias=False, batch_first=True, dtype=torch.float64)
heads = list(zip(*theirs.in_proj_weight.detach().numpy().reshape(3, 4, 16, 64), strict=True))
output, weights = reference.multi_head_attention(value, heads, theirs.out_proj.weight.detach().numpy(), mask)
with torch.no_grad():
    by_torch, weights_by_torch = theirs(v, v, v, attn_mask=added, average_attn_weights=False)
difference = max(np.abs(output - by_torch[0].numpy()).max(), np.abs(weights - weights_by_torch[0].numpy()).max())
print(f"four heads: largest difference from PyTorch {difference:.0e}")
assert difference < 1e-12

# %% [markdown]
# The mask makes text generation cheap: when a new token arrives, nothing changes for the earlier ones. We demonstrate
# this on sixteen squares of the photograph, from left to right. The queries and keys are their colours, as in step 2.
# We run attention on the first 4, the first 8, and all 16.

# %%
row, first, last = 11, 7, 23
photograph = load_sample_image("flower.jpg")[:416] / 255
colours = photograph.reshape(26, 16, 40, 16, 3).mean(axis=(1, 3))
tokens = colours - colours.mean(axis=(0, 1))
tokens = (tokens / np.linalg.norm(tokens, axis=-1, keepdims=True))[row, first:last]  # (16, 3)

runs = {n: masked_attention(3 * tokens[:n], 3 * tokens[:n], tokens[:n], np.tril(np.ones((n, n)))) for n in (4, 8, 16)}

for n in (4, 8):
    difference = max(np.abs(runs[16][0][:n] - runs[n][0]).max(), np.abs(runs[16][1][:n, :n] - runs[n][1]).max())
    print(f"the first {n} tokens, alone and among 16: largest difference {difference:.0e}")
    assert difference < 1e-14

# %% [markdown]
# In each map below, row $i$ shows what token $i$ takes from the tokens above the map. Yellow means everything, dark
# means little, and grey means forbidden. Each smaller map is the corner of the next one, inside the orange frame.

# %% alt="Three triangular attention maps for 4, 8 and 16 tokens; each is the top left corner of the next"
figure, panels = plt.subplots(2, 3, figsize=(6.4, 2.9), height_ratios=(1, 8), sharex="col", layout="constrained")
for column, (n, (_, weights)) in enumerate(runs.items()):
    strip = photograph[16 * row : 16 * (row + 1), 16 * first : 16 * (first + n)]
    panels[0, column].imshow(strip, extent=(-0.5, n - 0.5, 0.5, -0.5), aspect="auto")
    panels[0, column].set_title(f"{n} tokens")
    shown = np.where(np.tril(np.ones((n, n))) == 1, weights, np.nan)
    panels[1, column].imshow(shown, cmap="viridis", norm=PowerNorm(0.5, 0, 1), aspect="auto")
    panels[1, column].set_facecolor("lightgrey")
    if column:
        panels[1, column].add_patch(
            Rectangle((-0.5, -0.5), n / 2, n / 2, fill=False, edgecolor="#e69f00", linewidth=3)
        )
    for panel in panels[:, column]:
        panel.set(xticks=[], yticks=[])
panels[1, 0].set_ylabel("token that takes")
figure.supxlabel("token that is taken from", fontsize=10)
plt.show()

# %% [markdown]
# Images need no such rule: a square may look at squares to its right. So a Vision Transformer uses no mask. Next,
# attention becomes part of a block, and blocks are stacked.
