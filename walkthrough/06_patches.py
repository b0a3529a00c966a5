# %% [markdown]
# # 6. Patches
#
# A transformer takes a list of vectors. A photograph is a grid of pixels. The idea of the Vision Transformer
# (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words") is simple. Cut the photograph into squares of 16 by 16
# pixels, the **patches**, and make each patch one token. A patch has 3 colours times 16 times 16 pixels, which is 768
# numbers. An image of 224 by 224 pixels has 14 times 14 patches, which is 196.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import nn
from torch.nn import functional as F

from hf_vit_scratch.model import reference

photograph = Image.fromarray(load_sample_image("china.jpg")).crop((60, 0, 487, 427)).resize((224, 224))
image = np.asarray(photograph).transpose(2, 0, 1) / 255  # (3, 224, 224): colour, row, column
image = (image - 0.5) / 0.5  # from -1 to 1, as usual for networks


def extract_patches(image, size):
    channels, height, width = image.shape
    grid = image.reshape(channels, height // size, size, width // size, size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * size * size)


patches = extract_patches(image, 16)
print(f"{patches.shape[0]} patches of {patches.shape[1]} numbers")
assert (patches == reference.extract_patches(image, (16, 16))).all()
assert (patches == F.unfold(torch.from_numpy(image)[None], 16, stride=16)[0].T.numpy()).all()

# %% alt="A photograph of a temple, and the same photograph cut into 14 by 14 squares with gaps between them"
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.3), layout="constrained")
left.imshow(photograph)
left.set_title("224 x 224 pixels")
cut = np.ones((14 * 20, 14 * 20, 3))
for index, patch in enumerate(patches):
    top, start = 20 * (index // 14) + 2, 20 * (index % 14) + 2
    cut[top : top + 16, start : start + 16] = patch.reshape(3, 16, 16).transpose(1, 2, 0) / 2 + 0.5
right.imshow(cut)
right.set_title("14 x 14 patches")
for panel in (left, right):
    panel.axis("off")
plt.show()

# %% [markdown]
# ## The embedding
#
# One matrix $E$, the same for all patches, then multiplies the 768 numbers of a patch. The result is the token:
#
# $$\mathrm{token} = E \, \mathrm{patch} + b$$
#
# This is the **patch embedding**. Libraries implement it as a convolution whose stride equals its kernel size. It
# places the kernel on each patch once, multiplies, and adds up, which is the same computation. We compare the two
# with random numbers for $E$ and $b$ and a width of 768, which happens to be the size of a patch, too:

# %%
torch.manual_seed(0)
convolution = nn.Conv2d(3, 768, kernel_size=16, stride=16, dtype=torch.float64)
matrix, bias = convolution.weight.detach().numpy().reshape(768, 3 * 16 * 16), convolution.bias.detach().numpy()

tokens = patches @ matrix.T + bias

with torch.no_grad():
    by_torch = convolution(torch.from_numpy(image)[None])[0].flatten(1).T.numpy()
difference = np.abs(tokens - by_torch).max()
print(f"tokens {tokens.shape}; largest difference from the convolution: {difference:.0e}")
assert difference < 1e-12
by_reference = reference.patch_embedding(image, convolution.weight.detach().numpy(), bias)
assert np.abs(tokens - by_reference).max() < 1e-12

# %% [markdown]
# ## What it does to a photograph
#
# Each row of $E$ has as many numbers as a patch, 768. So it is itself a small picture, called a **filter**. The
# corresponding entry of the token says how much of that filter is in the patch. A trained network learns its filters.
# We have not trained anything yet. Instead, we take filters that are optimal for this photograph in one sense: its
# principal components. They preserve as much of the variance of the patches as any matrix with that many rows can.

# %%
mean = patches.mean(axis=0)
_, _, components = np.linalg.svd(patches - mean, full_matrices=False)
components *= np.sign(components.sum(axis=1, keepdims=True))  # a filter and its negative are equally good
matrix = components[:4]
bias = -matrix @ mean

tokens = patches @ matrix.T + bias

assert np.abs(matrix @ matrix.T - np.eye(4)).max() < 1e-12  # the filters are at right angles, of length 1
kept = 1 - ((patches - mean - tokens @ matrix) ** 2).sum() / ((patches - mean) ** 2).sum()
print(f"4 of 768 numbers for each patch keep {100 * kept:.0f}% of the variance of this photograph")

# %% [markdown]
# The upper row shows the first four filters. Below each filter is its response: one entry of all 196 tokens, in the
# layout of the photograph. Yellow is a large number, and blue is a negative one.

# %% alt="Four filters of 16 by 16 pixels, and below each the map of its response over the temple photograph"
figure, panels = plt.subplots(2, 5, figsize=(6.4, 3.1), layout="constrained")
panels[0, 0].axis("off")
panels[1, 0].imshow(photograph)
panels[1, 0].set_title("photograph")
for index, (above, below) in enumerate(panels.T[1:]):
    colour_filter = matrix[index].reshape(3, 16, 16).transpose(1, 2, 0)
    above.imshow(0.5 + 0.5 * colour_filter / np.abs(colour_filter).max())
    above.set_title(f"filter {index + 1}")
    below.imshow(tokens[:, index].reshape(14, 14), cmap="cividis")
    below.set_title("response")
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# The first filter separates bright from dark, and so the sky from the temple. The second responds to horizontal edges,
# such as the roofs. The third responds to vertical edges. A patch has become a short list of such responses, and this
# list is the token. But the token does not say where in the photograph the patch was. That is the next step.
