"""Safetensors files: tensors, with the description of their network in the header. They cannot contain code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.config.record import NetworkRecord
from zoo.errors import WeightsError, shorten_repr, truncate

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 10**8  # limit of the format
# Keys of the header's metadata. Values are text; other programs expect "format": "pt".
FORMAT, NETWORK = "format", "network"


def is_safetensors(head: bytes) -> bool:
    """Return whether a file starts like a safetensors file: with the length of its JSON header, and ``{``."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def check_installed(where: object = "") -> None:
    """Raise WeightsError if the package safetensors is not installed. ``where`` is the file that needs it."""
    if find_spec("safetensors") is None:
        what = "safetensors files need the package safetensors, which is not installed"
        raise WeightsError(what, where, "pip install safetensors")


def read_safetensors(path: Path) -> dict[str, Any]:
    """Load a safetensors file; return its content with the keys of other weights files.

    The content is the state dict, or if the header describes the network, a dict with "state_dict" and "network".
    Raises WeightsError for a damaged file, and if the package safetensors is not installed.
    """
    check_installed(path)
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            # Copies the tensors: they are views of the mapped file, and another program could truncate it.
            state_dict = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # the package has its own exceptions
        reason = truncate(error)
        what = f"the file is not a safetensors file, or it is damaged or truncated ({type(error).__name__}: {reason})"
        raise WeightsError(what, path, "download it again") from None
    if NETWORK not in metadata:
        return state_dict
    return {"state_dict": state_dict, "network": _network(metadata[NETWORK], path)}


def _network(text: str, path: Path) -> dict[str, Any]:
    """Return the description of the network in the header, not yet validated."""
    try:
        network = json.loads(text)
    except (ValueError, RecursionError) as error:
        network = error
    if not isinstance(network, dict):
        what = f"{NETWORK} in the header's metadata is {shorten_repr(text)}, not a JSON object that describes a network"
        raise WeightsError(what, path, "ask who made the file, or write it again with zoo convert export")
    return network


def safetensors_bytes(state_dict: Mapping[str, Tensor], record: NetworkRecord | None = None) -> bytes:
    """Return the bytes of a safetensors file. Other programs read it as a plain state dict.

    Args:
    - `state_dict`: the tensors; tensors that share memory are written in full under each key.
    - `record`: description of the network for the header, or None.

    Raises WeightsError for tensors that the format does not support, and if the package safetensors is not installed.
    """
    check_installed()
    from safetensors.torch import save

    metadata = {FORMAT: "pt"}
    if record is not None:
        metadata[NETWORK] = json.dumps(record.content(), allow_nan=False)
    try:
        return save({key: tensor.detach().clone().contiguous() for key, tensor in state_dict.items()}, metadata)
    except (KeyError, ValueError, RuntimeError) as error:
        what = f"the tensors cannot be written as safetensors ({type(error).__name__}: {truncate(error)})"
        raise WeightsError(what, remedy="write a .pth file, or convert the tensors to another dtype") from error
