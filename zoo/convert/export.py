"""Exports a network as a torch.export program or ONNX, and verifies the written file."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ConversionError, VerificationError
from zoo.files import replacing
from zoo.layers.norm import InPlaceABN

ONNX_PACKAGES = ("onnx", "onnxscript")
TOLERANCE = 1e-3  # largest difference relative to the largest output: float32 sums in another order


def export(model: nn.Module, path: str | Path, size: int = 224) -> float:
    """Write ``model`` to a .pt2 or .onnx file; return the largest absolute error of the written network's outputs.

    The written file is loaded and run on two random images, and compared with ``model``, before it replaces ``path``.

    A .pt2 file of a network with in-place norms needs zoo to be imported, which registers their operators. ONNX needs
    optional packages: pip install ".[onnx]". Its names are "input" and "logits" ("features" for a network without
    classes; "stage1", "stage2" and so on for a list of maps), with the dynamic dimension "batch".

    Args:
    - `model`: the network; set to evaluation mode and single precision.
    - `path`: file to write; missing folders are created.
    - `size`: side of the images in px. The exported network takes float32 images (N, 3, size, size) for any N.

    Raises ConversionError for another file suffix, missing packages, in-place norms in ONNX, and outputs that are not
    tensors; VerificationError for outputs that differ.
    """
    path = Path(path)
    _check_format(path)
    if path.suffix == ".onnx" and any(isinstance(part, InPlaceABN) for part in model.modules()):
        raise ConversionError(
            f"{type(model).__name__} has in-place norms, whose operators ONNX does not have; export "
            'zoo.convert.fold_network(model) or zoo.convert.convert_norm(model, "standard"), or write a .pt2 file'
        )
    model = model.eval().float()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, names = _outputs(model, images)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Both writers read the suffix of the name.
    with replacing(path, suffix=f".tmp{path.suffix}") as temporary:
        if path.suffix == ".onnx":
            written_outputs = _write_onnx(program, temporary, images, names)
        else:
            written_outputs = _write_program(program, temporary, images)
        difference = max(
            (ours - truth).abs().max().item() for ours, truth in zip(written_outputs, expected, strict=True)
        )
        if not difference <= TOLERANCE * max(1.0, *(truth.abs().max().item() for truth in expected)):
            raise VerificationError(f"the exported outputs differ by {difference:.2e}; nothing was written", path)
    return difference


def _check_format(path: Path) -> None:
    if path.suffix not in (".pt2", ".onnx"):
        raise ConversionError(f"unknown format {path.suffix!r}", path, "use the suffix .pt2 (torch.export) or .onnx")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise ConversionError(
            f"ONNX needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            path,
            'pip install ".[onnx]", or export to a .pt2 file',
        )


def _outputs(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the network's outputs as a list, and their names."""
    result = model(images)
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    if not outputs or not all(isinstance(output, Tensor) for output in outputs):
        raise ConversionError(
            f"{type(model).__name__} returns a {type(result).__name__}; only networks that return a tensor or a list "
            "of tensors can be exported"
        )
    if several:
        return outputs, [f"stage{number}" for number in range(1, len(outputs) + 1)]
    num_classes = getattr(model, "num_classes", None)
    has_classes = outputs[0].dim() == 2 if num_classes is None else num_classes > 0
    return outputs, ["logits" if has_classes else "features"]


def _write_program(program: torch.export.ExportedProgram, path: Path, images: Tensor) -> list[Tensor]:
    torch.export.save(program, path)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch 2.11's own loader
        outputs, _ = _outputs(torch.export.load(path).module(), images)
    return outputs


def _write_onnx(program: torch.export.ExportedProgram, path: Path, images: Tensor, names: list[str]) -> list[Tensor]:
    onnx: Any = importlib.import_module("onnx")
    reference: Any = importlib.import_module("onnx.reference")
    written: Any = torch.onnx.export(
        program, dynamo=True, input_names=["input"], output_names=names, dynamic_shapes=({0: "batch"},), verbose=False
    )
    written.save(str(path))
    session = reference.ReferenceEvaluator(onnx.load(str(path)))
    return [torch.from_numpy(output) for output in session.run(None, {"input": images.numpy()})]
