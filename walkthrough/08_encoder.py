# %% [markdown]
# # 8. The encoder
#
# The layers of a Vision Transformer are the residual blocks of step 5, with three changes.
#
# The matrices of the attention also get a **bias**, a vector that is added to the result.
#
# **GELU** replaces ReLU. It does nearly the same, but bends smoothly at 0: $\mathrm{gelu}(x) = x \, \Phi(x)$. Here,
# $\Phi(x)$ is the probability that a standard normal number is below $x$. The feed-forward network with GELU is called
# the **MLP** (multi-layer perceptron).
#
# **Layer normalisation** keeps numbers in bounds. It shifts and scales each token to mean 0 and variance 1. The
# network then chooses a scale $\gamma$ and a shift $\beta$ for each of the $d$ entries:
#
# $$\mathrm{LN}(x) = \gamma \, \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} + \beta$$
#
# Where is the norm placed? There are two answers. The first transformer, and BERT after it, normalise *after* the
# addition. This is called **post-LN**. The Vision Transformer normalises *before* each branch and does not change the
# sum. This is called **pre-LN**.
#
# $$\mathrm{post\text{-}LN:} \quad x \leftarrow \mathrm{LN}(x + f(x)) \qquad\qquad
# \mathrm{pre\text{-}LN:} \quad x \leftarrow x + f(\mathrm{LN}(x))$$
#
# Here, $f$ is first the attention and then the MLP.

# %%
import inspect
import math
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.conversion.parity import randomize_
from hf_vit_scratch.model import reference
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchLayer


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def layer_norm(x, gamma, beta, eps):
    centred = x - x.mean(axis=-1, keepdims=True)
    return gamma * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) + beta


def encoder_layer(x, p, num_heads, norm_first, eps):
    def norm(name, x):
        return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def linear(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def attention(x):
        q, k, v = (np.split(linear(f"attention.{letter}_proj", x), num_heads, axis=-1) for letter in "qkv")
        # The matrices of all heads are stacked (step 3), so the heads lie side by side.
        outputs = [reference.attention(*head)[0] for head in zip(q, k, v, strict=True)]  # as in step 2
        return linear("attention.o_proj", np.hstack(outputs))

    def mlp(x):
        return linear("mlp.fc2", gelu(linear("mlp.fc1", x)))

    if norm_first:  # pre-LN
        x = x + attention(norm("layernorm_before", x))
        return x + mlp(norm("layernorm_after", x))
    x = norm("layernorm_before", x + attention(x))  # post-LN
    return norm("layernorm_after", x + mlp(x))


# %% [markdown]
# This is the same layer in PyTorch, from this package. In training, dropout sets random numbers to 0, and drop path
# does so with complete branches. Both do nothing when the model is used.

# %%
print(textwrap.dedent(inspect.getsource(ViTScratchLayer.forward)))

# %% [markdown]
# We compare three implementations: the two above and PyTorch's own `nn.TransformerEncoderLayer`. All get the same
# random numbers for every parameter, including scales and shifts. (Training starts with scales of 1 and shifts of 0.
# With these, a comparison would not notice if two norms were swapped.) The implementations agree in both styles.

# %%
sizes = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 384, "layer_norm_eps": 1e-6}
torch.manual_seed(0)
x = torch.randn(1, 50, 96, dtype=torch.float64)

for norm_first in (False, True):
    config = ViTScratchConfig(**sizes, norm_first=norm_first, hidden_dropout_prob=0.0, attn_implementation="eager")
    ours = randomize_(ViTScratchLayer(config, drop_path_prob=0.0), std=0.2).double().eval()
    state = ours.state_dict()

    theirs = nn.TransformerEncoderLayer(
        96, 4, 384, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=norm_first
    ).double()
    theirs_of_ours = {
        "self_attn.out_proj": "attention.o_proj",
        "linear1": "mlp.fc1",
        "linear2": "mlp.fc2",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
    }
    renamed = {f"{a}.{kind}": state[f"{b}.{kind}"] for a, b in theirs_of_ours.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        renamed[f"self_attn.in_proj_{kind}"] = torch.cat(
            [state[f"attention.{letter}_proj.{kind}"] for letter in "qkv"]
        )
    theirs.load_state_dict(renamed)

    with torch.no_grad():
        by_package, by_torch = ours(x)[0][0].numpy(), theirs.eval()(x)[0].numpy()
    parameters = {name: tensor.numpy() for name, tensor in state.items()}
    by_hand = encoder_layer(x[0].numpy(), parameters, num_heads=4, norm_first=norm_first, eps=1e-6)
    by_reference, _ = reference.encoder_layer(x[0].numpy(), parameters, num_heads=4, norm_first=norm_first, eps=1e-6)

    differences = [np.abs(by_hand - other).max() for other in (by_package, by_torch, by_reference)]
    print(
        "pre-LN: " if norm_first else "post-LN:",
        "largest differences from the package, from PyTorch and from the reference:",
        ", ".join(f"{difference:.0e}" for difference in differences),
    )
    assert max(differences) < 1e-11

# %% [markdown]
# What difference does the place of the norm make? The plot below shows the size of the tokens (the root of the mean
# square of their entries) after each of 24 layers, before any training. With post-LN, it is 1 after every layer.
# Pre-LN adds up the outputs of all layers and lets the sum grow. So it needs one last norm at the end of the stack.
# The first layers still have a direct path to the output, which makes deep stacks easier to train.

# %%
pixels = torch.randn(4, 3, 64, 64)
token_sizes = {}
for norm_first in (False, True):
    torch.manual_seed(0)
    config = ViTScratchConfig.from_variant("Ti/8", image_size=64, num_hidden_layers=24, norm_first=norm_first)
    config.initializer_range = 0.1  # larger than usual, so that every layer has a visible effect
    with torch.no_grad():
        hidden_states = ViTScratchModel(config).eval()(pixels, output_hidden_states=True).hidden_states
    token_sizes[norm_first] = [states.pow(2).mean().sqrt().item() for states in hidden_states]

print(f"after 24 layers: post-LN {token_sizes[False][-1]:.2f}, pre-LN {token_sizes[True][-1]:.2f}")
assert abs(token_sizes[False][-1] - 1) < 1e-3 < 2 < token_sizes[True][-1]

# %% alt="Size of the tokens after each of 24 layers: flat at 1 for post-LN, growing steadily for pre-LN"
figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for norm_first, name, colour in ((True, "pre-LN", "#0072b2"), (False, "post-LN", "#d55e00")):
    axes.plot(token_sizes[norm_first], marker="o", markersize=4, color=colour)
    axes.annotate(
        name, (20, token_sizes[norm_first][20]), (0, 12), textcoords="offset points", color=colour, ha="right"
    )
axes.set(xlabel="layer", ylabel="size of the tokens", xticks=range(0, 25, 4))
axes.set_ylim(0, 1.15 * max(token_sizes[True]))
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# The encoder is complete. Two famous models have exactly these layers, one in each style. The next two steps show that
# our model computes the same results.
