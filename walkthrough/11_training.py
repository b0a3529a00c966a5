# %% [markdown]
# # 11. Training on digits
#
# A model with random parameters gives random answers. Training changes the parameters little by little:
#
# 1. Show the model a *batch*: a few images whose classes are known.
# 2. Measure how wrong it is. The usual measure is the **cross-entropy loss**. It takes the share that softmax (step 1)
#    gives to the right class: $\mathrm{loss} = -\log(\mathrm{share})$. It is 0 when the model is certain and right.
# 3. Compute how fast the loss grows with each parameter. This is the *gradient*, which PyTorch computes.
# 4. Move every parameter a small step the other way, and repeat.
#
# scikit-learn ships 1,797 handwritten digits of 8 by 8 pixels. This is small enough to train on while you wait. We set
# 360 digits aside for the test, and 180 to watch the progress of training.

# %%
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from transformers.utils.logging import disable_progress_bar

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification

disable_progress_bar()  # those of saving one file

digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8), from -1 to 1
labels = torch.tensor(digits.target)

torch.manual_seed(0)
test, validation, train = torch.randperm(len(pixels)).split((360, 180, 1257))

# %% [markdown]
# The model is a small version of the Vision Transformer of step 10. It has 16 patches of 2 by 2 pixels, tokens of
# width 64, and three pre-LN layers with four heads.

# %%
config = ViTScratchConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    norm_first=True,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    initializer_range=0.1,  # narrow tokens need larger random numbers than the usual 0.02
)
model = ViTScratchForImageClassification(config)
print(f"{model.num_parameters():,} parameters")


@torch.no_grad()
def predict(images):
    model.eval()
    return model(images).logits.argmax(dim=-1)


def accuracy(split):
    return (predict(pixels[split]) == labels[split]).float().mean().item()


before = accuracy(validation)
print(f"right before training: {100 * before:.0f}% of the validation digits")

# %% [markdown]
# This is the training. AdamW is the usual method for the steps. It gives each parameter its own step size. The
# schedule lets the step size rise at first and then fall to nearly 0. It also changes how far AdamW averages past
# gradients. An *epoch* is one pass over all training images.

# %%
epochs, batch_size = 12, 32
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
steps = epochs * math.ceil(len(train) / batch_size)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)

losses, accuracies = [], [before]
for _ in range(epochs):
    model.train()
    for batch in train[torch.randperm(len(train))].split(batch_size):
        loss = model(pixels[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    accuracies.append(accuracy(validation))

test_accuracy = accuracy(test)
print(f"right after {epochs} epochs: {100 * test_accuracy:.1f}% of the 360 test digits")
assert test_accuracy > 0.9

folder = Path(tempfile.gettempdir(), "hf_vit_scratch_walkthrough")  # for the next step
model.save_pretrained(folder)
torch.save(test, folder / "test.pt")

# %% alt="Over the epochs the loss falls from about 2.5 towards 0, and the share of right answers rises towards 1"
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 2.9), layout="constrained")
per_epoch = len(losses) // epochs
left.plot([step / per_epoch for step in range(len(losses))], losses, color="#0072b2", linewidth=0.8)
left.set(title="loss of each batch", xlabel="epoch", ylim=(0, None))
right.plot(accuracies, marker="o", color="#0072b2")
right.set(title="share of right answers", xlabel="epoch", ylim=(0, 1.02))
for panel in (left, right):
    panel.set_xticks(range(0, epochs + 1, 3))
    panel.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Which test digits does the model get wrong? Below each digit is the model's answer and, in brackets, the digit that
# the writer meant.

# %% alt="Test digits that the model takes for another, each with its answer and, in brackets, what was meant"
answers = predict(pixels[test])
wrong = (answers != labels[test]).nonzero().flatten()
print(f"{len(wrong)} of {len(test)} are wrong")

shown = wrong[:14]
figure, panels = plt.subplots(2, 7, figsize=(6.4, 2.4), layout="constrained")
for panel in panels.flat:
    panel.axis("off")
for panel, index in zip(panels.flat, shown, strict=False):
    panel.imshow(pixels[test[index], 0].numpy(), cmap="gray_r", vmin=-1, vmax=1)
    panel.text(
        0.5, -0.08, f"{answers[index]} ({labels[test[index]]})", transform=panel.transAxes, ha="center", va="top"
    )
plt.show()

# %% [markdown]
# Every line of this loop is simple, but real training needs more: random changes of the images (augmentation), a way
# to resume after an interruption, many devices, and records. The script `train.py` of this package does all of this.
# The last step looks into the model that we have just trained.
