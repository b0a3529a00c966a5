"""Classify images with the exported model beside this file.

    python predict.py IMAGE [IMAGE ...]    files, not folders; prints a JSON line for each

The line of an image that cannot be read has its error. The exit code is then 1, and otherwise 0.

It needs Pillow and the runtime of the model: onnxruntime, openvino or torch (see requirements.txt).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps


def load(model: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Return a model as a function: upright RGB images, uint8 (B, height, width, 3) -> scores (B, L)."""
    if model.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(model)
        return lambda images: session.run(None, {"images": images})[0]
    if model.suffix == ".xml":
        import openvino

        # Or CPUs that have bfloat16 would compute in it.
        compiled = openvino.compile_model(model, config={"INFERENCE_PRECISION_HINT": "f32"})
        return lambda images: compiled(images)[0]
    import torch

    module = torch.export.load(model).module()
    return lambda images: module(torch.from_numpy(images)).detach().numpy()


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an open image as upright RGB pixels, just as transformers' pipelines do.

    Raises:
        ValueError: It is an EPS file, or has grey values that 8 bits cannot hold: pipelines clip them.
    """
    if image.format == "EPS":  # for which Pillow starts Ghostscript
        raise ValueError("EPS files are not supported")
    if image.mode[0] in "IF":  # one channel of values that RGB cannot hold: Pillow clips them at 255
        plain: Any = image if image.mode in ("I", "F") else image.convert("I")  # Pillow knows no extrema of I;16B
        low, high = plain.getextrema()
        if not 0 <= low <= high <= 255 or (image.mode == "F" and 0 < high <= 1):  # also refuses NaN
            raise ValueError(f"its grey values go from {low:g} to {high:g}, not from 0 to 255: save it with 8 bits")
    image = ImageOps.exif_transpose(image)
    # Pipelines show one transparent color as white. If a palette has several, they show the colors beneath.
    if image.mode != "RGBA" and isinstance(image.info.get("transparency"), int | tuple):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def read_image(file: Any) -> np.ndarray:
    """Return the image in a file as upright RGB pixels, uint8 (height, width, 3)."""
    with Image.open(file) as opened:
        return np.array(to_rgb(opened))


if __name__ == "__main__":
    folder = Path(__file__).parent
    facts = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit(len(sys.argv) == 1)
    scores_of, exit_code = load(folder / facts["model"]), 0
    for path in sys.argv[1:]:
        try:
            image = read_image(path)
        except Exception as error:  # Pillow raises many types on damaged data
            print(json.dumps({"image": path, "error": str(error)}))
            exit_code = 1
            continue
        scores = scores_of(image[None])[0]
        # Numbers keep their order; of classes, the best five are shown.
        order = range(len(scores)) if facts["problem_type"] == "regression" else (-scores).argsort(kind="stable")[:5]
        predictions = [{"label": facts["labels"][i], "score": float(scores[i])} for i in order]
        print(json.dumps({"image": path, "predictions": predictions}))
    sys.exit(exit_code)
