"""Reads the state dict out of a weights file without ever running code from it."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.errors import WeightsError
from zoo.weights.keys import published_keys

logger = logging.getLogger("zoo")

READ_BYTES = 2**20
COMPRESSED = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"  # gzip, bzip2, xz
# What torch says of a function or class that it does not let a file use.
REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the dict in the file at ``path`` with all that it holds, tensors on the CPU.

    Understood are `torch.save` files in the zip format and in the one before it, with tensors, plain Python values
    and numpy numbers. Raises WeightsError for anything else; a file that would run code is refused and nothing of it
    is run.
    """
    path = Path(path)
    _refuse_other_formats(path)
    content = _load_safely(path)
    if not isinstance(content, dict) or not content:
        found = "an empty dict" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise WeightsError(f"{path}: holds {found} and no state dict; save model.state_dict()")
    return content


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the network's tensors in the file at ``path``, on the CPU, with the keys that the networks have now.

    The file holds a state dict, or a trainer's dict with a state dict under "state_dict" and perhaps a moving average
    of the weights under "ema", which then is what is returned: training validated it. A "module." before all keys and
    the ".bn" level of old norms are dropped. Raises WeightsError for anything else, as `read_checkpoint` does.
    """
    return state_dict_in(read_checkpoint(path), path)


def state_dict_in(content: dict[Any, Any], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return what `read_state_dict` does of the content of the file at ``path``, which was read already."""
    if isinstance(content.get("state_dict"), dict):
        averaged = content.get("ema")
        if averaged is not None:
            logger.info("%s: the moving average of the weights is read, which is what training validated", path)
        content = content["state_dict"] if averaged is None else averaged
    _check_is_state_dict(content, path)
    return published_keys({key: tensor.detach() for key, tensor in content.items()}, str(path))


def md5_of(path: str | os.PathLike[str]) -> str:
    """Return the md5 of the file at ``path`` as 32 hexadecimal digits; it is read in pieces.

    Raises WeightsError if it cannot be read.
    """
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open(path, "rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest()


def _unreadable(path: str | os.PathLike[str], error: OSError) -> WeightsError:
    return WeightsError(f"{path}: cannot be read ({error.strerror}); give the path of a weights file")


def _refuse_other_formats(path: Path) -> None:
    """Raise WeightsError for what is often taken for weights: a saved web page, an archive, an empty file."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not head:
        raise WeightsError(f"{path}: is empty; download it again")
    if head.lstrip().startswith(b"<"):
        raise WeightsError(
            f"{path}: is a web page, not weights; the download stopped at a page that asks for confirmation or "
            "reports an error: open it in a browser and download the file from there"
        )
    if head[257:262] == b"ustar" or head.startswith(COMPRESSED):
        raise WeightsError(
            f"{path}: is an archive; unpack it and give the weights file inside "
            "(the published .pth.tar files are none, despite their name)"
        )


def _numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return what the pickle of a numpy number names, in the spellings of numpy 1 and 2."""
    scalar: Any = np.float64(0).__reduce__()[0]
    names = "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"
    codes = np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
    dtypes = {type(np.dtype(code)) for code in codes}
    return [(scalar, names[0]), (scalar, names[1]), np.dtype, *dtypes]


def _load_safely(path: Path) -> Any:
    """Return the content of a `torch.save` file: tensors, plain Python values and numpy numbers, nothing else."""
    # Those that the user allowed already must stay allowed when the context ends.
    allowed = [item for item in _numpy_globals() if item not in torch.serialization.get_safe_globals()]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols and TorchScript; they load or raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise _load_error(path, error) from None


def _load_error(path: Path, error: Exception) -> WeightsError:
    message = str(error)
    if refused := REFUSED.search(message):
        return WeightsError(
            f"{path}: refused, and nothing of it was run: opening it would call {refused[1]}, and a weights file may "
            "hold only tensors, plain Python values and numpy numbers; whoever made it can save model.state_dict() "
            "with torch.save instead"
        )
    if isinstance(error, pickle.UnpicklingError):
        message = message.partition("\n\n")[2] or message  # before it stands advice to load unsafely
    reason = next(iter(message.splitlines()), "").split(". ")[0]
    return WeightsError(
        f"{path}: is no weights file that torch can read, or is damaged or cut short "
        f"({type(error).__name__}: {reason}); download it again"
    )


def _check_is_state_dict(content: dict[Any, Any], path: str | os.PathLike[str]) -> None:
    if {"body", "head", "cls"} <= content.keys():
        raise WeightsError(
            f"{path}: holds a segmentation model (body, head and cls), which is not supported; give the weights of a "
            "classification network"
        )
    foreign = [
        f"{key!r} ({type(value).__name__})"
        for key, value in content.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if foreign:
        raise WeightsError(
            f"{path}: holds no state dict: these entries are not tensors: {', '.join(foreign)}; "
            'save model.state_dict(), or a dict with it under "state_dict"'
        )
