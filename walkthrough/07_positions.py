# %% [markdown]
# # 7. Positions
#
# Attention compares every token with every other token and takes a sum. A sum has no order. If the patches of a
# photograph are shuffled, attention gives each patch the same output as before, only in the shuffled order. Our
# transformer cannot yet tell these two photographs apart. Both are the same bag of patches:

# %%
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

from hf_vit_scratch.model import reference
from hf_vit_scratch.model.modeling_vit_scratch import sincos2d_positions

photograph = Image.fromarray(load_sample_image("china.jpg")).crop((60, 0, 487, 427)).resize((224, 224))
image = np.asarray(photograph).transpose(2, 0, 1) / 255
patches = reference.extract_patches(image, (16, 16))  # (196, 768), as in step 6
order = np.random.default_rng(0).permutation(196)


# %% alt="A photograph of a temple, and the same photograph with its 196 patches in random order"
def assemble(patches):
    return patches.reshape(14, 14, 3, 16, 16).transpose(0, 3, 1, 4, 2).reshape(224, 224, 3)


figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.3), layout="constrained")
for panel, title, shown in zip(panels, ("in order", "shuffled"), (patches, patches[order]), strict=True):
    panel.imshow(assemble(shown))
    panel.set_title(title)
    panel.axis("off")
plt.show()

# %% [markdown]
# We check this claim: attention on shuffled patches equals the shuffled output of attention.

# %%
rng = np.random.default_rng(0)
w_q, w_k, w_v = rng.standard_normal((3, 64, 768)) / np.sqrt(768)

output, _ = reference.attention_head(patches, w_q, w_k, w_v)
output_of_shuffled, _ = reference.attention_head(patches[order], w_q, w_k, w_v)

difference = np.abs(output_of_shuffled - output[order]).max()
print(f"largest difference: {difference:.0e}")
assert difference < 1e-12

# %% [markdown]
# The solution is to add a vector to each token that says where it is, its **position embedding**. Then the same patch
# at another place is a different token. Queries and keys can also ask for places, as the second and third head of step
# 3 did.
#
# What should the vectors be? The Vision Transformer *learns* them. It has a table with one row for each place, which
# starts with small random numbers. Other position embeddings are fixed and need no learning. They are sines and
# cosines of the column $x$ and the row $y$, at many frequencies $\omega$. So some entries tell neighbours apart, and
# others tell left from right:
#
# $$p(x, y) = [\sin(x \omega), \; \cos(x \omega), \; \sin(y \omega), \; \cos(y \omega)] \quad
# \mathrm{for} \; \omega \; \mathrm{from} \; 1 \; \mathrm{to} \; 1 / 10000$$


# %%
def positions(rows, cols, width):
    y, x = (number.reshape(-1, 1) for number in np.mgrid[:rows, :cols])
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    return np.hstack(
        (np.sin(x * frequencies), np.cos(x * frequencies), np.sin(y * frequencies), np.cos(y * frequencies))
    )


table = positions(14, 14, 768)
difference = np.abs(table - sincos2d_positions((14, 14), 768).numpy()).max()
print(f"a table of {table.shape}; largest difference from the package: {difference:.0e}")
assert difference < 1e-12

output, _ = reference.attention_head(patches + table, w_q, w_k, w_v)
output_of_shuffled, _ = reference.attention_head(patches[order] + table, w_q, w_k, w_v)
difference = np.abs(output_of_shuffled - output[order]).max()
print(f"with positions, shuffling now matters: difference {difference:.1f}")
assert difference > 0.1

# %% [markdown]
# How similar are the vectors of two places? Each small map below belongs to one place and is drawn at that place. It
# shows the cosine of the angle between the vector of its own place and those of all 14 by 14 places.

# %% alt="Five by five small maps; in each, the bright spot lies at the place to which the map belongs"
lengths = np.linalg.norm(table, axis=1)
likeness = (table @ table.T / np.outer(lengths, lengths)).reshape(14, 14, 14, 14)
places = (0, 3, 6, 10, 13)
figure, panels = plt.subplots(5, 5, figsize=(5.6, 4.8), layout="constrained")
for (i, j), panel in np.ndenumerate(panels):
    shown = panel.imshow(likeness[places[i], places[j]], cmap="viridis", vmax=1, vmin=likeness.min())
    panel.set(xticks=[], yticks=[])
    if j == 0:
        panel.set_ylabel(f"row {places[i]}")
    if i == 4:
        panel.set_xlabel(f"column {places[j]}")
figure.colorbar(shown, ax=panels, label="likeness of two places", shrink=0.8)
plt.show()

# %% [markdown]
# Nearby places have similar vectors, and so do places in the same row or column. One token is still missing. At the
# end, one vector must describe the complete image. It can be the mean of all tokens. Or one more token is placed
# before the patches, the **class token**. It starts the same for every image and collects information from the
# patches. It has a position of its own. There are 196 patches and one class token, so step 2 had 197 tokens. Now we
# have everything for the encoder.
