# %% [markdown]
# # 10. ViT-B/16 = ours
#
# ViT-B/16 is the Vision Transformer of the paper, in its base size. It has patches of 16 by 16 pixels, tokens of width
# 768, 12 layers, 12 heads, and an MLP four times as wide as the tokens. You know all its parts by now. This is how
# they fit together:
#
# | step | shape for one photograph |
# | --- | --- |
# | pixels, between -1 and 1 | 3 x 224 x 224 |
# | patches (step 6) | 196 x 768 |
# | patch embedding (step 6) | 196 x 768 |
# | class token before them (step 7) | 197 x 768 |
# | plus positions (step 7) | 197 x 768 |
# | 12 pre-LN encoder layers (step 8) | 197 x 768 |
# | a last norm (step 8) | 197 x 768 |
# | the class token alone | 768 |
# | one linear layer, the classifier | 1000 scores, one for each class |
#
# We compare three implementations on the photograph of the temple: the `ViTModel` of the transformers library, ours in
# PyTorch, and the reference in NumPy. The reference consists of the functions of steps 1 to 8. All 86 million
# parameters are random.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from transformers import ViTConfig, ViTModel
from transformers import initialization as init

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.conversion.convert import from_vit
from hf_vit_scratch.conversion.parity import randomize_
from hf_vit_scratch.model import reference

photograph = Image.fromarray(load_sample_image("china.jpg")).crop((60, 0, 487, 427)).resize((224, 224))
image = np.asarray(photograph).transpose(2, 0, 1) / 127.5 - 1

with init.no_init_weights():  # they are drawn below
    theirs = ViTModel(ViTConfig(), add_pooling_layer=False)
torch.manual_seed(0)
randomize_(theirs, std=0.05).double().eval()
ours = from_vit(theirs)
print(f"{sum(parameter.numel() for parameter in ours.parameters()):,} parameters; norm_first={ours.config.norm_first}")

with torch.no_grad():
    pixels = torch.from_numpy(image)[None]
    expected = theirs(pixels, output_hidden_states=True)
    actual = ours(pixels, output_hidden_states=True)
parameters = {name: tensor.numpy() for name, tensor in ours.state_dict().items()}
by_numpy, last_by_numpy, _ = reference.vit(
    image, parameters, num_layers=12, num_heads=12, norm_first=True, eps=ours.config.layer_norm_eps
)

# %% [markdown]
# We compare the tokens after the embeddings, after each of the twelve layers, and after the last norm:

# %%
print("                  size of entries   ours - transformers   ours - NumPy")
stages = ["embeddings", *(f"layer {number}" for number in range(1, 13)), "last norm"]
mine = [*actual.hidden_states, actual.last_hidden_state]
others = zip([*expected.hidden_states, expected.last_hidden_state], [*by_numpy, last_by_numpy], strict=True)
for stage, tokens, (by_transformers, by_reference) in zip(stages, mine, others, strict=True):
    size = tokens.abs().max().item()
    from_transformers = (tokens - by_transformers).abs().max().item()
    from_numpy = np.abs(tokens[0].numpy() - by_reference).max()
    print(f"{stage:>16}  {size:15.1f}   {from_transformers:19.0e}   {from_numpy:12.0e}")
    assert from_transformers <= 1e-12 * size
    assert from_numpy <= 1e-12 * size

# %% [markdown]
# They are equal, up to rounding. Where are all these parameters? We add the classifier for the 1000 classes of
# ImageNet and count. The sum is 86,567,656, the known number of this model.

# %%
with torch.device("meta"):  # shapes alone, no numbers
    classifier = ViTScratchForImageClassification(ViTScratchConfig(norm_first=True, num_labels=1000))
parts = {
    "patch embedding": "patch_embeddings",
    "positions, class token": "position_embeddings cls_token",
    "attention": ".attention.",
    "MLP": ".mlp.",
    "norms": "layernorm",
    "classifier": "classifier",
}
counts = {
    part: sum(p.numel() for name, p in classifier.named_parameters() if any(word in name for word in words.split()))
    for part, words in parts.items()
}
for part, count in counts.items():
    print(f"{count:>10,}  {part}")
assert sum(counts.values()) == sum(p.numel() for p in classifier.parameters()) == 86_567_656

# %% alt="Bar chart of parameters by part: the MLPs have two thirds, attention one third, all else very little"
figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
bars = axes.barh(list(counts), [count / 1e6 for count in counts.values()], color="#0072b2")
axes.bar_label(bars, [f"{count / 1e6:.2f}" for count in counts.values()], padding=3)
axes.invert_yaxis()
axes.set(xlabel="million parameters", xlim=(0, 65))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Two thirds are in the MLPs and one third is in the attention. The patch embedding, the only part that is specific to
# images, has less than one in a hundred. So far, every number was random. The next step makes them useful.
