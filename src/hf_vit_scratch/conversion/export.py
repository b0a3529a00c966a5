"""Write a classifier as one file that needs neither this package nor transformers, with its preprocessing inside."""

import copy
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from numpy.typing import NDArray
from PIL.Image import Resampling
from torch import Tensor, nn
from torch.export import Dim
from transformers import ImageClassificationPipeline

from ..data.images import mean_and_std, refuse_other_preprocessing
from ..data.targets import ProblemType
from ..errors import UserError

FILES = {"onnx": "model.onnx", "openvino": "model.xml", "pt2": "model.pt2"}
# The last one runs the file.
PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "onnxruntime", "openvino"),  # onnxruntime for 8-bit integers
    "pt2": ("torch",),
}
PRODUCTS = ["Conv", "Gemm", "MatMul"]  # those with weights become faster with 8-bit integers


class ImageScores(nn.Module):
    """A classifier with all that its pipeline does: RGB images, uint8 (B, height, width, 3) -> scores (B, L).

    Images are resized by matrix products, because each runtime interpolates in its own way.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, image_processor: Any):
        super().__init__()
        self.model, self.problem_type = model, model.config.problem_type
        self.size = image_processor.size["height"], image_processor.size["width"]
        self.bicubic = image_processor.resample == Resampling.BICUBIC
        for name, numbers in zip(("mean", "std"), mean_and_std(image_processor), strict=True):
            self.register_buffer(name, numbers)

    def forward(self, images: Tensor) -> Tensor:
        """Resize images along their width, then their height, and classify them."""
        pixels = images.permute(0, 3, 1, 2).double()  # in which torch's sums of integers are exact
        pixels = _to_bytes(pixels @ resizing_matrix(pixels.shape[3], self.size[1], self.bicubic).T)
        pixels = _to_bytes(resizing_matrix(pixels.shape[2], self.size[0], self.bicubic) @ pixels)
        logits = self.model((pixels.float() - self.mean) / self.std).logits
        if self.problem_type == "regression":
            return logits
        return logits.sigmoid() if self.problem_type == "multi_label_classification" else logits.softmax(-1)


def resizing_matrix(old: int, new: int, bicubic: bool) -> Tensor:
    """Return the weights (new, old), in float64, by which torch resizes bytes with antialiasing, as Pillow does.

    The filter is a triangle or Keys' cubic (Keys 1981, https://doi.org/10.1109/TASSP.1981.1163711, a = -1/2), as wide
    as the step between new pixels. Weights are rounded to 16-bit integers times one power of two.
    """
    step = torch.full((), old, dtype=torch.float64) / new
    center = (torch.arange(new, dtype=torch.float64)[:, None] + 0.5) * step
    distance = (torch.arange(old) + 0.5 - center).abs() / step.clamp(min=1)
    if bicubic:
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
        weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    else:
        weights = (1 - distance).clamp(min=0)
    weights = weights / weights.sum(1, keepdim=True)
    one: Tensor = 2 ** torch.log2((2**15 - 0.5) / weights.max()).floor().clamp(max=22)
    return (weights * one + 0.5).floor() / one


def _to_bytes(pixels: Tensor) -> Tensor:
    return (pixels + 0.5).floor().clamp(0, 255)


def export(
    classifier: ImageClassificationPipeline, folder: Path, format: str, calibration: Sequence[NDArray[Any]] = ()
) -> Path:
    """Write the model of a pipeline into a folder for a runtime, and return the file.

    Args:
        classifier: A pipeline on the CPU, in float32.
        folder: An existing folder.
        format: One of `FILES`.
        calibration: Images, uint8 (1, height, width, 3), for the ranges of 8-bit integers; none for float32.

    Raises:
        UserError: The image processor does what cannot be exported.
    """
    refuse_other_preprocessing(classifier.image_processor)
    model: Any = copy.deepcopy(classifier.model)
    model.set_attn_implementation("eager")  # torch's own also searches for rows without any key
    module = ImageScores(model, classifier.image_processor).eval()
    example = torch.zeros(2, *(pixels + 3 for pixels in module.size), 3, dtype=torch.uint8)
    with torch.no_grad():
        axes = dict.fromkeys((0, 1, 2), Dim.DYNAMIC)
        program = torch.export.export(module, (example,), dynamic_shapes=(axes,))
    path = folder / FILES[format]
    if format == "pt2":
        torch.export.save(program, path)
        return path
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as aside:
        graph = path if format == "onnx" else Path(aside) / "model.onnx"
        plain = Path(aside) / "plain.onnx" if calibration else graph
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["scores"]}
        cast(Any, torch.onnx.export(program, dynamo=True, verbose=False, **names)).save(plain)
        if calibration:
            _quantize(plain, graph, calibration)
        if format == "openvino":
            import openvino

            openvino.save_model(openvino.convert_model(graph), path, compress_to_fp16=False)
    return path


def refuse_missing_packages(format: str) -> None:
    """Raise a `UserError` if a package for a format is not installed."""
    if missing := [package for package in PACKAGES[format] if find_spec(package) is None]:
        raise UserError(f"--format {format} needs more packages: python -m pip install {' '.join(missing)}")


def labels_and_type(config: Any) -> tuple[list[str], ProblemType]:
    """Return the names of a model's classes or numbers, in order, and its problem type."""
    names = [config.id2label[number] for number in range(config.num_labels)]
    return names, config.problem_type or "single_label_classification"


def _quantize(source: Path, target: Path, calibration: Sequence[NDArray[Any]]) -> None:
    """Let the products with weights of an ONNX file compute in 8-bit integers."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static

    inputs = iter([{"images": image} for image in calibration])
    reader: Any = SimpleNamespace(get_next=lambda: next(inputs, None))  # all that is asked of a CalibrationDataReader
    graph = onnx.load(source, load_external_data=False).graph
    weights = {weight.name for weight in graph.initializer}
    quantize_static(
        source,
        target,
        reader,
        nodes_to_quantize=[node.name for node in graph.node if node.op_type in PRODUCTS and node.input[1] in weights],
        activation_type=QuantType.QUInt8,
        per_channel=True,
        reduce_range=True,  # weights to 7 bits: CPUs without VNNI add two products of 8 bits in 16
        extra_options={"OpTypesToExcludeOutputQuantization": PRODUCTS},
    )
