"""Writes a network as a torch.export program or as ONNX, and compares what was written with the network."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ConversionError, VerificationError

ONNX_PACKAGES = ("onnx", "onnxscript")
# Single precision in another order of summation.
TOLERANCE = 1e-3


def export(model: nn.Module, path: str | Path, size: int = 224, metadata: Mapping[str, Any] | None = None) -> float:
    """Write ``model`` for float32 pictures (any N, 3, size, size) to ``path``, a .pt2 or .onnx file.

    The file is read again and run on two random pictures; the largest absolute difference to ``model`` is returned.
    ``model`` is put into evaluation mode. A .onnx file needs the optional packages: pip install ".[onnx]".
    ``metadata`` are plain values that go into the file as JSON: into KEY.json of a .pt2 (see ``extra_files`` of
    `torch.export.load`), into ``metadata_props`` of a .onnx. Raises ConversionError for another ending or missing
    packages, VerificationError for outputs that differ.
    """
    path = Path(path)
    _check_format(path)
    model = model.eval().float()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {key: json.dumps(value) for key, value in (metadata or {}).items()}
    write = _write_onnx if path.suffix == ".onnx" else _write_program
    found = write(program, path, images, texts)
    with torch.no_grad():
        expected = model(images)
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise VerificationError(f"{path}: computes outputs that differ by {difference:.2e} from the network's")
    return difference


def _check_format(path: Path) -> None:
    if path.suffix not in (".pt2", ".onnx"):
        raise ConversionError(f"{path}: cannot tell the format to export; name the file .pt2 (torch.export) or .onnx")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise ConversionError(
            f"{path}: ONNX needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            'pip install ".[onnx]", or export to a .pt2 file'
        )


def _write_program(
    program: torch.export.ExportedProgram, path: Path, images: Tensor, texts: Mapping[str, str]
) -> Tensor:
    torch.export.save(program, path, extra_files={f"{key}.json": text for key, text in texts.items()})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch 2.11's own loader
        output: Tensor = torch.export.load(path).module()(images)
    return output


def _write_onnx(program: torch.export.ExportedProgram, path: Path, images: Tensor, texts: Mapping[str, str]) -> Tensor:
    onnx: Any = importlib.import_module("onnx")
    reference: Any = importlib.import_module("onnx.reference")
    written: Any = torch.onnx.export(program, dynamo=True)
    written.model.metadata_props.update(texts)
    written.save(str(path))
    session = reference.ReferenceEvaluator(onnx.load(str(path)))
    return torch.from_numpy(session.run(None, {session.input_names[0]: images.numpy()})[0])
