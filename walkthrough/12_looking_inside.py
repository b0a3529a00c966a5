# %% [markdown]
# # 12. Looking inside
#
# The model of step 11 reads digits. How does it do this? We can look at its attention weights. For each layer, head
# and token, they say what share the token takes from each token, itself included.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from transformers.utils.logging import disable_progress_bar

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.interpretation import attention_maps

disable_progress_bar()

folder = Path(tempfile.gettempdir(), "hf_vit_scratch_walkthrough")
if not (folder / "test.pt").exists():
    raise SystemExit("Run step 11 first: it trains the model.")
model = ViTScratchForImageClassification.from_pretrained(folder).eval()

digits = load_digits()
test = torch.load(folder / "test.pt")  # the model has seen none of them
pixels = torch.tensor(digits.images, dtype=torch.float32)[test, None] / 8 - 1
labels = torch.tensor(digits.target)[test]
with torch.no_grad():
    answers = model(pixels).logits.argmax(dim=-1)
print(f"right: {100 * (answers == labels).float().mean():.1f}% of {len(test)} test digits")

maps = attention_maps.attention(model, pixels)
print("images, layers, heads, tokens, tokens:", tuple(maps.shape))
assert (maps.sum(dim=-1) - 1).abs().max() < 1e-5  # 32-bit numbers have about 7 digits

# %% [markdown]
# The class token comes first. Its row says what it takes from each of the 16 patches. The plot shows this row for one
# digit, in each of the three layers and four heads. The brighter a patch, the more the class token takes from it.

# %% alt="A handwritten digit, and twelve copies of it, each with the patches brightened that one head attends to"
index = ((answers == 3) & (labels == 3)).nonzero()[0].item()
from_patches = maps[index, :, :, 0, 1:].unflatten(-1, (4, 4))  # (layers, heads, rows, columns)
assert torch.equal(from_patches, attention_maps.over_patches(maps[index], (4, 4)))

figure, panels = plt.subplots(3, 5, figsize=(6.4, 4), layout="constrained")
for layer, head in ((layer, head) for layer in range(3) for head in range(4)):
    panel = panels[layer, head + 1]
    shown = panel.imshow(from_patches[layer, head].numpy(), cmap="viridis", vmin=0, vmax=from_patches.max().item())
    if layer == 0:
        panel.set_title(f"head {head + 1}")
    if head == 0:
        panel.set_ylabel(f"layer {layer + 1}")
panels[0, 0].imshow(pixels[index, 0].numpy(), cmap="gray_r")
panels[0, 0].set_title("the digit")
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
for panel in panels[1:, 0]:
    panel.axis("off")
figure.colorbar(shown, ax=panels, label="share", shrink=0.8)
plt.show()

# %% [markdown]
# Twelve maps are too many to read. Here are two ways to summarise them in one map.
#
# **Attention rollout** (Abnar and Zuidema 2020) follows the information from layer to layer. A layer mixes the tokens
# by its weights $A$ (the mean of its heads), and the residual connection keeps what was there. Rollout assumes half of
# each. The product over the layers says what share of each patch has arrived in the class token:
#
# $$R = \frac{A_L + I}{2} \cdots \frac{A_2 + I}{2} \, \frac{A_1 + I}{2}$$
#
# Later layers are on the left. Row 0 belongs to the class token.

# %%
rollout = torch.eye(17)
for layer in maps.mean(dim=2).unbind(dim=1):
    rollout = (layer + torch.eye(17)) / 2 @ rollout

difference = (rollout - attention_maps.rollout(maps)).abs().max().item()
print(f"rollout {tuple(rollout.shape)}; largest difference from the package: {difference:.0e}")
assert difference < 1e-6

# %% [markdown]
# Rollout does not know which class we ask about. **Class attention** (Chefer et al. 2021, *Generic Attention-model
# Explainability*) does. It multiplies each weight by the gradient of the score of that class. It keeps the positive
# values, which support the class. Their mean over the heads, $\bar A$, is followed through the layers:
# $R \leftarrow R + \bar A R$, starting from $R = I$.
#
# We can test this. For each test digit, we blank out the four patches that matter most for the model's answer
# according to the map. Then we count how often the answer is still right. We repeat this with the four patches that
# matter least.

# %%
relevance = attention_maps.class_attention(model, pixels)  # (images, 4, 4), for the class that the model answers


@torch.no_grad()
def accuracy_without(patches):
    hidden = torch.zeros(len(pixels), 16, dtype=torch.bool).scatter(1, patches, True).unflatten(1, (1, 4, 4))
    hidden = hidden.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)  # patches of 2 by 2 pixels
    return (model(pixels.masked_fill(hidden, -1)).logits.argmax(dim=-1) == labels).float().mean().item()


order = relevance.flatten(1).argsort(dim=1, descending=True)
right = {
    "with all patches": accuracy_without(order[:, :0]),
    "without the four least": accuracy_without(order[:, -4:]),
    "without the four most": accuracy_without(order[:, :4]),
}
for name, share in right.items():
    print(f"{name}: {100 * share:.0f}% right")
assert right["without the four most"] < right["without the four least"] - 0.1

# %% [markdown]
# So class attention finds patches that the answer depends on. We have not tested rollout. Below are both for five
# test digits. The upper row shows the digit, the middle row shows rollout, and the lower row shows class attention
# for the model's answer.

# %% alt="Five digits, and below each its rollout map and its class attention map, bright on the strokes that matter"
chosen = [((answers == digit) & (labels == digit)).nonzero()[0].item() for digit in (0, 2, 3, 5, 9)]
rows = {
    "digit": pixels[chosen, 0],
    "rollout": attention_maps.over_patches(rollout[chosen], (4, 4)),
    "class attention": relevance[chosen],
}
figure, panels = plt.subplots(3, 5, figsize=(6.4, 4), layout="constrained")
for line, (name, images) in zip(panels, rows.items(), strict=True):
    line[0].set_ylabel(name)
    for panel, image in zip(line, images, strict=True):
        panel.imshow(image.numpy(), cmap="gray_r" if name == "digit" else "viridis")
        panel.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# The bright patches lie on the strokes, often where this digit differs from others. The maps show where the model
# looks. They do not prove that it is right for the right reasons.
#
# These twelve steps are a complete Vision Transformer. Only the gradients and the optimizer were left to PyTorch. A
# larger model has more layers, wider tokens and more images to learn from, but no other parts. To train one on your
# own images, put each class into a folder of its own and run `vit-scratch train your_images --data FOLDER`.
