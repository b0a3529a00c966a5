# %% [markdown]
# # 9. BertModel = ours
#
# BERT (Devlin et al. 2019) is a transformer for text with a post-LN encoder. Its layers do not know that their tokens
# are words. With a class token and the patches of an image instead of word vectors, it is a Vision Transformer. A
# well-known tutorial trains it in this way on CIFAR-10, a collection of small photographs. It uses images of 32 by 32
# pixels, patches of 4 by 4, tokens of width 256, 12 layers and 8 heads.
#
# This code builds it from the `BertModel` of the transformers library:

# %%
import copy

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from transformers import BertConfig, BertModel

from hf_vit_scratch.conversion.convert import from_bert
from hf_vit_scratch.conversion.parity import randomize_

config = BertConfig(
    hidden_size=256,
    num_hidden_layers=12,
    num_attention_heads=8,
    intermediate_size=1024,
    vocab_size=1,
    max_position_embeddings=65,
    attn_implementation="eager",
)
torch.manual_seed(0)
bert = BertModel(config, add_pooling_layer=False)
convolution = nn.Conv2d(3, 256, kernel_size=4, stride=4)
cls_token = torch.randn(256) / 256**0.5
for module in (bert, convolution):
    randomize_(module, std=0.05).double().eval()  # every parameter, so that each one counts


def encode(pixels):
    patches = convolution(pixels).flatten(2).transpose(1, 2)
    tokens = torch.cat((cls_token.double().expand(len(pixels), 1, -1), patches), dim=1)
    return bert(inputs_embeds=tokens, output_hidden_states=True, output_attentions=True)


# %% [markdown]
# BERT adds two vectors to each token: its position, and one that says which of two sentences it belongs to. That one
# is always the same here. BERT also normalises the sum.
#
# Now we build ours. `from_bert` creates our model and copies BERT's parameters. The two vectors become one, our
# position. Every other parameter has its own place. All weights are random, and none is trained.

# %%
ours = from_bert(bert, convolution, cls_token.double())
ours.set_attn_implementation("eager")
print(f"post-LN: norm_first={ours.config.norm_first}; {ours.num_parameters():,} parameters")

photographs = [Image.fromarray(pixels).resize((32, 32)) for pixels in load_sample_images().images]
pixels = torch.from_numpy(np.stack([np.asarray(photograph) for photograph in photographs]) / 127.5 - 1)
pixels = pixels.permute(0, 3, 1, 2)  # (2 images, 3 colours, 32, 32)

with torch.no_grad():
    expected = encode(pixels)
    actual = ours(pixels, output_hidden_states=True, output_attentions=True)


def differences(actual):
    states = zip(actual.hidden_states, expected.hidden_states, strict=True)
    return [(mine - theirs).abs().max().item() for mine, theirs in states]


by_layer = differences(actual)
maps = zip(actual.attentions, expected.attentions, strict=True)
of_maps = max((mine - theirs).abs().max().item() for mine, theirs in maps)
print(f"largest difference: tokens after any layer {max(by_layer):.0e}, attention weights {of_maps:.0e}")
assert max(by_layer) < 1e-12
assert of_maps < 1e-12

# %% [markdown]
# A comparison proves something only if it would detect a fault. So we plant three faults in copies of our model, one
# at a time:
#
# - an activation that is nearly GELU (its usual approximation by a hyperbolic tangent);
# - one of the twelve layers without one of its biases;
# - one layer with its two norms swapped.

# %%
faults = {"no fault": ours}

faults["nearly GELU"] = copy.deepcopy(ours)
for layer in faults["nearly GELU"].layers:
    layer.mlp.activation = nn.GELU(approximate="tanh")

faults["bias lost in layer 6"] = copy.deepcopy(ours)
faults["bias lost in layer 6"].layers[5].attention.o_proj.bias.data.zero_()

faults["norms swapped in layer 9"] = copy.deepcopy(ours)
layer = faults["norms swapped in layer 9"].layers[8]
layer.layernorm_before, layer.layernorm_after = layer.layernorm_after, layer.layernorm_before

with torch.no_grad():
    curves = {name: differences(model(pixels, output_hidden_states=True)) for name, model in faults.items()}
for name, curve in curves.items():
    print(f"{name}: {max(curve):.0e}")
    assert name == "no fault" or max(curve) > 1e-6

# %% [markdown]
# The plot shows the difference from BERT after every layer. On its scale, each grid line is a hundred times the one
# below it. A fault is visible from its layer on.

# %% alt="Differences from BERT by layer: about 1e-14 without a fault; from the layer of a fault on, above 1e-4"
figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
styles = {
    "no fault": "#000000",
    "nearly GELU": "#009e73",
    "bias lost in layer 6": "#0072b2",
    "norms swapped in layer 9": "#d55e00",
}
for marker, (name, colour) in zip("osD^", styles.items(), strict=True):
    axes.semilogy(curves[name], marker=marker, markersize=5, color=colour, label=name)
axes.set(xlabel="layer (0: embeddings)", ylabel="largest difference from BERT", xticks=range(13), ylim=(1e-17, 1e5))
axes.set_yticks([10.0**power for power in range(-16, 5, 2)])
axes.minorticks_off()
axes.grid(alpha=0.3)
axes.legend(ncols=2, loc="upper left", fontsize=9, frameon=False)
plt.show()

# %% [markdown]
# Without a fault, the two models differ only by rounding. The next step shows the other style, and a model of full
# size.
