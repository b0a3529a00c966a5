# %% [markdown]
# # 1. Softmax
#
# A transformer decides again and again how much to take of each of several things. It has one score for each thing. A
# score is a number of any size and sign. The transformer needs *shares*: numbers between 0 and 1 that add up to 1,
# with the largest share for the largest score.
#
# Softmax turns scores into shares. First, take the exponential of every score. This makes all of them positive and
# keeps their order. Then divide by their sum:
#
# $$\mathrm{softmax}(s)_i = \frac{e^{s_i}}{\sum_j e^{s_j}}$$

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from hf_vit_scratch.model import reference


def softmax_as_written(scores):
    exponentials = np.exp(scores)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


shares = softmax_as_written(np.array([2.0, 1.0, 0.0]))
print("shares of the scores 2, 1, 0:", shares.round(3))
assert abs(shares.sum() - 1) < 1e-15

# %% [markdown]
# This code has a flaw. The exponential of 1000 is too large for a floating point number. It becomes infinity, and
# infinity divided by infinity is not a number (NaN).

# %%
with np.errstate(over="ignore", invalid="ignore"):
    shares = softmax_as_written(np.array([1000.0, 999.0]))

print("shares of the scores 1000, 999:", shares)
assert np.isnan(shares).all()

# %% [markdown]
# One subtraction solves this. Subtract the same number $c$ from every score. Numerator and denominator then both lose
# the factor $e^c$, so no share changes:
#
# $$\frac{e^{s_i - c}}{\sum_j e^{s_j - c}} = \frac{e^{-c} \, e^{s_i}}{e^{-c} \sum_j e^{s_j}} = \mathrm{softmax}(s)_i$$
#
# Choose the largest score as $c$. Then no exponent is above 0, and nothing overflows.


# %%
def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


shares = softmax(np.array([1000.0, 999.0]))
print("shares of the scores 1000, 999:", shares.round(3))
assert np.isfinite(shares).all()

# %% [markdown]
# Is it right? Each step of this walkthrough asks this question and lets the computer answer. Here, we compare the
# lines above with the function of this package (`reference.py`) and with PyTorch. The scores are random, and the
# numbers are 64-bit floating point. If a sentence says that two things are equal, the code below it stops with an
# error if they are not.

# %%
scores = 100 * np.random.default_rng(0).standard_normal((50, 20))  # 50 lists of 20 scores

by_torch = torch.from_numpy(scores).softmax(dim=-1).numpy()
difference = np.abs(softmax(scores) - by_torch).max()
print(f"largest difference from PyTorch: {difference:.0e}")
assert difference < 1e-14
assert (softmax(scores) == reference.softmax(scores)).all()

# %% [markdown]
# The size of the scores controls how sharply softmax decides. Below, the same five scores are multiplied by three
# numbers. Small scores give nearly equal shares. Large scores give nearly everything to the winner.

# %% alt="Three bar charts of five shares: nearly equal for small scores, one bar near 1 for large scores"
scores = np.array([1.0, 2.0, 0.0, 3.0, 1.0])
figure, panels = plt.subplots(1, 3, figsize=(6.4, 2.9), sharey=True, layout="constrained")
for panel, factor in zip(panels, (0.25, 1, 4), strict=True):
    bars = panel.bar(range(5), softmax(factor * scores), color="#0072b2")
    panel.bar_label(bars, fmt="%.2f", fontsize=9)
    panel.set_xticks(range(5), [f"{factor * score:g}" for score in scores], fontsize=9)
    panel.set(title=f"scores times {factor}", xlabel="score", ylim=(0, 1.1))
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("share")
plt.show()

# %% [markdown]
# So a transformer can say "a little of everything" and "only this one" with the same function. The next step shows
# where the scores come from.
