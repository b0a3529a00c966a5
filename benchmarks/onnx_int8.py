"""Measure size, speed and accuracy of a trained model in PyTorch and in ONNX Runtime, there also with int8 weights.

    python train.py && python benchmarks/onnx_int8.py runs/digits --data digits

The int8 weights are quantized dynamically. The three variants take turns in each round. The script prints the median
milliseconds per image and the accuracy on the test split.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from transformers import AutoImageProcessor
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.data.dataset import ImageClassificationDataset
from hf_vit_scratch.data.splits import load_splits

Predict = Callable[[np.ndarray], np.ndarray]  # images (B, C, height, width) -> logits (B, L)


def session(path: Path, threads: int) -> Predict:
    """Return a function that runs an ONNX file with ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    runtime = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: runtime.run(None, {"pixel_values": images})[0]


def milliseconds(kinds: dict[str, Predict], images: np.ndarray, rounds: int) -> dict[str, float]:
    """Return the median milliseconds per image of each variant."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, predict in kinds.items():
            start = time.perf_counter()
            predict(images)
            seconds[kind].append(time.perf_counter() - start)
    return {kind: 1000 * statistics.median(of) / len(images) for kind, of in seconds.items()}


def main() -> None:
    """Measure the variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a classifier")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()

    model = ViTScratchForImageClassification.from_pretrained(args.model).eval()
    dataset = ImageClassificationDataset(
        load_splits(args.data)["test"], AutoImageProcessor.from_pretrained(args.model)
    )
    whole = dataset.batch_transform(dataset.__getitems__(range(len(dataset))))
    images, labels = whole["pixel_values"].numpy(), whole["labels"].numpy()

    @torch.no_grad()
    def predict(pixels: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(pixels)).logits.numpy()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = {"pixel_values": {axis: torch.export.Dim.DYNAMIC for axis in (0, 2, 3)}}
        config = OnnxConfig(dynamic=True, dynamic_shapes=shapes)
        OnnxExporter().export(model, {"pixel_values": torch.from_numpy(images[:2])}, config=config).save_pretrained(
            folder
        )
        quantize_dynamic(folder / "model.onnx", folder / "int8.onnx")
        megabytes = {
            "PyTorch": sum(parameter.nbytes for parameter in model.parameters()),
            "ONNX Runtime": sum(path.stat().st_size for path in folder.glob("model.onnx*")),
            "ONNX Runtime, int8": (folder / "int8.onnx").stat().st_size,
        }
        kinds: dict[str, Predict] = {
            "PyTorch": predict,
            "ONNX Runtime": session(folder / "model.onnx", torch.get_num_threads()),
            "ONNX Runtime, int8": session(folder / "int8.onnx", torch.get_num_threads()),
        }
        one, many = (milliseconds(kinds, images[:batch], args.rounds) for batch in (1, 64))
        print("| | MB | test accuracy | ms per image, batches of 1 | of 64 |\n| --- | --- | --- | --- | --- |")
        for kind, run in kinds.items():
            accuracy = 100 * (run(images).argmax(1) == labels).mean()
            print(f"| {kind} | {megabytes[kind] / 1e6:.2f} | {accuracy:.1f}% | {one[kind]:.2f} | {many[kind]:.3f} |")


if __name__ == "__main__":
    main()
