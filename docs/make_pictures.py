"""Draw the picture of the README: test images, a model's answers, and the patches that spoke for them.

    python docs/make_pictures.py runs/cifar10_cpu --data FOLDER

The images are the first of each class in the test split, whether the answers are right or wrong. Two files are written
into `docs/pictures`, for light and for dark pages.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_vit_scratch.data.images import images_of
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.evaluation.predict import load_classifier
from hf_vit_scratch.interpretation.attention_maps import ImageAttention, inspect_image

FOLDER = Path(__file__).with_name("pictures")


def draw(seen: list[ImageAttention], truths: list[str], color: str, path: Path) -> None:
    """Draw each image above a grey copy with its class attention, with the answer as its title."""
    figure = Figure(figsize=(1.25 * len(seen), 3.4), layout="constrained")
    axes: Any = figure.subplots(2, len(seen))
    for (above, below), image, truth in zip(axes.T, seen, truths, strict=True):
        height, width = image.pixels.shape[:2]
        best = image.predictions[0]
        above.set_title(f"{best['label']}\n{best['score']:.0%}", fontsize=13, color=color)
        if best["label"] != truth:
            below.set_title(f"is {truth}", fontsize=13, color=color)
        above.imshow(image.pixels)
        below.imshow(image.pixels.mean(axis=-1), cmap="gray", vmin=0, vmax=255)
        below.imshow(
            image.class_attention[0].numpy(), cmap="viridis", vmin=0, alpha=0.6,
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        )  # fmt: skip
        for panel in (above, below):
            panel.axis("off")
    figure.savefig(path, dpi=130, transparent=True)


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--data", required=True, help="its images")
    args = parser.parse_args()
    classifier = load_classifier(args.run, "cpu")
    rows = load_splits(args.data, near_duplicates="ignore")["test"]
    labels = np.array(rows["label"][:])
    places = [int(np.flatnonzero(labels == number)[0]) for number in np.unique(labels)]
    names = rows.features["label"].names
    seen = [inspect_image(classifier, image) for image in images_of(rows.select(places))]
    FOLDER.mkdir(exist_ok=True)
    for theme, color in (("light", "black"), ("dark", "white")):
        draw(seen, [names[labels[place]] for place in places], color, FOLDER / f"cifar10_{theme}.png")


if __name__ == "__main__":
    main()
