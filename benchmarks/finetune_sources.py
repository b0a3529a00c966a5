"""Starting points for `finetune`: ViTs of timm, transformers and torchvision, trained and saved as those libraries do.

    python benchmarks/finetune_sources.py --library timm --data SOURCE --minutes 10 --output_dir pretrained/timm

`train.py finetune --model` then takes the folder, or torchvision's file `weights.pt` in it. The model has 4 layers of
128 with 2 heads, 32x32 pixels and patches of 4. torch's Muon and AdamW train it, with the rates and the schedule of
`cifar10_cpu`. Images are shifted by up to 4 pixels and mirrored. `--minutes 0` saves random weights.
"""

import argparse
import functools
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import own_images
import torch
from torch import nn

LIBRARIES = ("timm", "transformers", "torchvision")
SIDE, PATCH, WIDTH, LAYERS, HEADS = 32, 4, 128, 4, 2
BATCH = 128
MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


def main() -> None:
    """Train for the given minutes, test, and save as the library does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--data", required=True, help="Folder with train and test.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Of training.")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    from transformers import ViTImageProcessor

    from hf_vit_scratch.data.augmentation import training_stages
    from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
    from hf_vit_scratch.data.mixup import Mixup
    from hf_vit_scratch.data.splits import load_splits

    torch.manual_seed(args.seed)
    splits = load_splits(args.data, seed=args.seed)
    names = splits["train"].features["label"].names
    imagenet = args.library == "torchvision"  # its files do not say how pixels were normalized, so ImageNet's is taken
    mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]) if imagenet else (MEAN, STD)
    processor = ViTImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=mean, image_std=std, do_convert_rgb=True
    )
    stages, _ = training_stages((SIDE, SIDE), crop_padding=4, horizontal_flip_prob=0.5)
    no_mixing = Mixup(len(names), label_smoothing=0.1)
    train = ImageClassificationDataset(splits["train"], BatchTransform(processor, stages, no_mixing, args.seed))
    test = ImageClassificationDataset(splits["test"], BatchTransform(processor))
    for dataset in (train, test):
        dataset.keep_decoded(torch.device("cpu"))
    model = build(args.library, len(names))
    network = Logits(model) if args.library == "transformers" else model
    passes = train_by_the_clock(network, train, 60 * args.minutes, args.seed) if args.minutes else 0.0
    print(f"{args.library}: {passes:.1f} passes, test accuracy {100 * own_images.test_accuracy(network, test):.1f}%")
    args.output_dir.mkdir(parents=True)
    save(args.library, model, names, processor, args.output_dir)


def train_by_the_clock(model: nn.Module, train: Any, seconds: float, seed: int) -> float:
    """Train for so many seconds, and return the passes made."""
    from torch.nn import functional as F

    from hf_vit_scratch.data.sampler import EpochSampler

    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        of_layer = any(part in name for part in ("blocks.", "layers.", "layer."))
        (matrices if of_layer and parameter.ndim == 2 else others).append(parameter)
    optimizers = {
        torch.optim.Muon(matrices, lr=3.5e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"): 3.5e-3,
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True): 3e-3,
    }
    sampler = EpochSampler(len(train), seed, BATCH)
    begin, seen, epoch = time.perf_counter(), 0, 0
    model.train()
    while True:
        sampler.set_epoch(epoch)
        for keys in batched(sampler, BATCH):
            progress = (time.perf_counter() - begin) / seconds
            if progress >= 1:
                return seen / len(train)
            for optimizer, rate in optimizers.items():
                for group in optimizer.param_groups:
                    group["lr"] = rate * min(progress / 0.03, 1.0, (1 - progress) / 0.7)
            batch = train.batch_transform(train.__getitems__(keys))
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen += BATCH
        epoch += 1


def batched(keys: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Return full batches."""
    iterator = iter(keys)
    while len(batch := list(islice(iterator, size))) == size:
        yield batch


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, classes)."""
        return self.model(pixel_values).logits


def build(library: str, classes: int) -> Any:
    """Return the library's ViT with random weights."""
    if library == "timm":
        import timm

        model: Any = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **timm_sizes())
        model.pretrained_cfg |= {"mean": tuple(MEAN), "std": tuple(STD)}
        return model
    if library == "transformers":
        from transformers import ViTConfig, ViTForImageClassification

        sizes: dict[str, Any] = {"image_size": SIDE, "patch_size": PATCH, "num_labels": classes, "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}  # fmt: skip
        return ViTForImageClassification(ViTConfig(**sizes))
    from torchvision.models import VisionTransformer

    norm = functools.partial(nn.LayerNorm, eps=1e-6)
    return VisionTransformer(SIDE, PATCH, LAYERS, HEADS, WIDTH, 4 * WIDTH, num_classes=classes, norm_layer=norm)


def timm_sizes() -> dict[str, Any]:
    """Return the sizes by timm's names."""
    return {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}


def save(library: str, model: Any, names: list[str], processor: Any, folder: Path) -> None:
    """Write the model as its library does."""
    if library == "timm":
        from timm.models import save_for_hf

        config = {"label_names": names}
        save_for_hf(model, str(folder), safe_serialization=True, model_config=config, model_args=timm_sizes())
    elif library == "transformers":
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: label for label, name in enumerate(names)}
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    else:
        torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main()
