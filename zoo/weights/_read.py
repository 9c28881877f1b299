"""Reads weights files without running code from them. SECURITY.md states what a hostile file cannot do."""

from __future__ import annotations

import logging
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from zoo.errors import WeightsError, escape, join_names, truncate
from zoo.weights._cache import open_published, open_weights, weights_path
from zoo.weights._safetensors_files import SUFFIX, is_safetensors, read_safetensors

logger = logging.getLogger("zoo")

ZIP_MAGIC = b"PK\x03\x04"
# Keys of the state dict in the files of trainers: this package and most others; many examples; torchvision and timm;
# PySlowFast.
STATE_DICT_KEYS = "state_dict", "model_state_dict", "model", "model_state"
# Keys of moving averages of the weights (trainers validate the average): this package; timm; torchvision, ConvNeXt.
AVERAGE_KEYS = "ema", "state_dict_ema", "model_ema"
# Prefixes of wrappers: DataParallel and DistributedDataParallel; torch.compile. They may be nested in any order.
WRAPPERS = "module.", "_orig_mod."
NUM_AVERAGED = "n_averaged"  # the counter of torch.optim.swa_utils.AveragedModel
COUNTERS_OF_THOP = "total_ops", "total_params"  # buffers that thop leaves in each layer
GIT_LFS = b"version https://git-lfs"
PARTS = "body", "head", "cls"  # the published segmentation model has one state dict for each part
# torch's message about a function or class that weights_only forbids.
REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
DIRECTORY = 0x10  # MS-DOS attribute of a zip entry
LEGACY_PICKLES = 5  # pickles at the start of a file in the format before zip; the storages follow
ALLOCATES = re.compile(r"(?:builtins|__builtin__) bytearray|torch\S* (?:\w*Tensor|UntypedStorage|TypedStorage)")
# numpy's dtype strings without byte order.
NUMBER_TYPE = re.compile(r"[iuf][248]|[iub]1|f16", re.ASCII)
SLACK_BYTES = 2**18  # allowance for zip directories: they are read twice
# Until July 2018 the norm classes wrapped a second module: bn1.bn.weight. A DenseNet key such as convs1.0.bn.weight
# has a number before its bn and stays; convs1.0.bn.bn.weight loses one level.
WRAPPED_NORM = re.compile(
    r"(?P<norm>(?:^|\.)(?:bn\d*|bn_out|\w+_bn))\.bn"
    r"(?P<leaf>\.(?:weight|bias|running_mean|running_var|num_batches_tracked))$"
)


class Oversized(ValueError):
    """Reading the file would take more memory than the file has bytes."""


def read_checkpoint(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Load the whole dict stored in the file at ``path``, with tensors on the CPU.

    Reads `torch.save` files (in zip or legacy format) with tensors, plain Python values and numpy scalars, and
    safetensors files if the package safetensors is installed. Takes about as much memory as the file has bytes. Raises
    WeightsError for any other file. Refuses files that would run code, without running any of it.
    """
    with open_weights(path) as file:
        return _content_of(file, Path(path))


def read_published(name: str) -> dict[Any, Any]:
    """Load the dict stored in the file of the published weights ``name``; download it if necessary.

    Raises the errors of `open_published` and `read_checkpoint`.
    """
    with open_published(name) as file:
        return _content_of(file, weights_path(name))


def _content_of(file: IO[bytes], path: Path) -> dict[Any, Any]:
    """Load the dict stored in an open file; ``path`` is for messages."""
    # A file named .safetensors is never unpickled, even if it contains a pickle.
    first = file.read(len(GIT_LFS))
    if first == GIT_LFS:
        what = "the file is a pointer of Git LFS, not the weights themselves"
        raise WeightsError(what, path, "run `git lfs pull` in its repository")
    reads_safetensors = is_safetensors(first[:9]) or path.suffix == SUFFIX
    content = read_safetensors(path) if reads_safetensors else _load_or_refuse(file, path)
    if not isinstance(content, dict) or not content:
        kind = "an empty dict" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise WeightsError(f"the file holds {kind} and no state dict", path, "save model.state_dict()")
    return content


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load the state dict stored in the file at ``path``, on the CPU, with current keys.

    - The file holds a state dict, or a trainer's dict with a state dict under one of `STATE_DICT_KEYS`.
    - If the trainer's dict has a moving average of the weights under one of `AVERAGE_KEYS`, the average is returned
      instead, because training validated it. This is logged.
    - Three state dicts "body", "head" and "cls", as in the published segmentation model, are joined.
    - The prefixes "module." and "_orig_mod.", and the ".bn" level of old norms are dropped.

    Raises WeightsError for anything else, like `read_checkpoint`.
    """
    return extract_state_dict(read_checkpoint(path), path)


def extract_state_dict(content: dict[Any, Any], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict in the ``content`` of a file, see `read_state_dict`; ``path`` is for messages."""
    trained = next((key for key in STATE_DICT_KEYS if isinstance(content.get(key), dict)), None)
    # In a bare state dict, such a key is the name of a tensor.
    averages = [each for each in AVERAGE_KEYS if isinstance(content.get(each), dict if trained is None else object)]
    average = next((each for each in averages if content.get(each) not in (None, {})), None)
    key = average or trained
    if key is not None:
        if not isinstance(content[key], dict):
            what = f'the file holds a {type(content[key]).__name__} under "{key}", not a moving average'
            raise WeightsError(what, path, "remove it, or save a state dict there")
        others = [each for each, value in content.items() if each != key and _is_state_dict(value)]
        if average is not None:
            logger.info("%s: reading the moving average of the weights (%s), which training validated", path, key)
        if others:
            logger.log(
                logging.WARNING if average is None else logging.INFO,
                "%s: reading %s, and not %s; torch.save(torch.load(FILE)[KEY], NEW) makes a file of one of them",
                path, key, join_names(others),
            )  # fmt: skip
        content = content[key]
    content = _join_parts(content)
    _check_is_state_dict(content, path)
    _refuse_repeated_values(content, path)
    counters = [name for name in content if name.rpartition(".")[2] in COUNTERS_OF_THOP]
    if counters:
        logger.warning("%s: dropped the counters of the package thop (%s)", path, join_names(counters))
    content = {name: tensor for name, tensor in content.items() if name != NUM_AVERAGED and name not in counters}
    return published_keys({key: tensor.detach() for key, tensor in content.items()}, escape(path))


def published_keys(state_dict: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return ``state_dict`` with current keys: without prefixes of wrappers and the old .bn level of norms.

    Drops a prefix if all keys have it. torch.compile of a part of a network adds its prefix to some keys only.

    Raises WeightsError, naming the ``source``, if two keys become the same.
    """
    keys = {key: key for key in state_dict}
    # all() is True for an empty dict.
    while keys and (prefix := next((p for p in WRAPPERS if all(key.startswith(p) for key in keys.values())), "")):
        keys = {key: plain.removeprefix(prefix) for key, plain in keys.items()}
    renamed: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        new_key = WRAPPED_NORM.sub(r"\g<norm>\g<leaf>", keys[key].replace("._orig_mod.", "."))
        if new_key in renamed:
            what = f"the file holds {truncate(new_key)} twice, once as {truncate(key)} of a wrapper or an old norm"
            raise WeightsError(what, source, "save model.state_dict() again")
        renamed[new_key] = tensor
    return renamed


def load_bounded(file: IO[bytes]) -> Any:
    """Load an open `torch.save` file of tensors, plain Python values and numpy scalars, and nothing else.

    An argparse.Namespace becomes an object without its values. No code in the file is run. Raises Oversized if the
    content takes more memory than the file has bytes. A damaged file can raise nearly any exception. Damage always
    raises one if the file has checksums, which zip files of `torch.save` have by default.
    """
    file.seek(0)
    if file.read(4) == ZIP_MAGIC:
        with zipfile.ZipFile(file) as archive:
            _check_archive(archive)
            for entry in archive.infolist():
                if entry.filename.lower().endswith("/data.pkl"):  # torch's reader ignores case
                    entry.CRC = None  # type: ignore[assignment]  # verified above, if the file has checksums
                    with archive.open(entry) as pickled:
                        _check_pickle(pickled)
    else:
        file.seek(0)
        for _ in range(LEGACY_PICKLES):
            _check_pickle(file)
    file.seek(0)
    metered: Any = _MeteredFile(file)  # implements the file methods that torch uses
    # Leaves out names that the user has allowed, so that they stay allowed when the context ends.
    allowed = [item for item in _replaced_globals() if item not in torch.serialization.get_safe_globals()]
    with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other pickle protocols and TorchScript warn, and then load or raise
        return torch.load(metered, map_location="cpu", weights_only=True)


def _check_archive(archive: zipfile.ZipFile) -> None:
    """Raise Oversized for compressed entries, and BadZipFile for entries that torch would load with wrong values.

    torch.save never compresses, and torch does not verify checksums.
    """
    entries = archive.infolist()
    for entry in entries:
        if entry.external_attr & DIRECTORY:  # torch would read nothing and return uninitialized memory
            raise zipfile.BadZipFile(f"{truncate(entry.filename)} is a directory")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise Oversized(
                f"its entry {truncate(entry.filename)} is compressed, and unpacks to {entry.file_size:,} bytes"
            )
    # torch.serialization.set_crc32_options(False) writes 0 as the checksum of every entry.
    if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {truncate(damaged)}")


def _check_pickle(pickled: IO[bytes]) -> None:
    """Raise Oversized if a pickle calls a class that allocates as much memory as a number in the pickle requests.

    torch's weights_only allows such calls. `torch.save` writes them only for dtypes without a storage class, such as
    float8, which no network supports. Raises ValueError if the file is not positioned at a pickle.
    """
    names = {str(argument) for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    if allocating := next(filter(ALLOCATES.fullmatch, names), None):
        raise Oversized(f"it calls {truncate(allocating)}, which can allocate any amount")


class _MeteredFile:
    """An open file that raises Oversized when more bytes are read from it than it has.

    A pickle can refer to one part of a file by many names, and torch reads the part into new memory for each name.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size + SLACK_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        return self._counted(self._file.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._counted(self._file.readline(size))

    def readinto(self, buffer: memoryview) -> int:
        num_bytes: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._count(num_bytes)
        return num_bytes

    def _counted(self, piece: bytes) -> bytes:
        self._count(len(piece))
        return piece

    def _count(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise Oversized("it refers to the same bytes several times")


class _NumberType:
    """Replaces numpy.dtype while unpickling; holds its name and byte order.

    numpy trusts the state of a pickled dtype, which can make it read arbitrary memory.
    """

    def __init__(self, name: str, *_: Any) -> None:
        self._name, self._order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def to_dtype(self) -> np.dtype[Any]:
        if not NUMBER_TYPE.fullmatch(self._name) or self._order not in ("<", ">", "=", "|"):
            raise ValueError(f"{truncate(self._name)} is not a numeric dtype")
        order: Any = self._order  # one of numpy's literals
        return np.dtype(self._name).newbyteorder(order)


def _number_of(kind: _NumberType | np.dtype[Any], content: bytes) -> Any:
    """Replaces numpy's `scalar` while unpickling; ``kind`` is numpy's own dtype if the user has allowed that class."""
    dtype = kind.to_dtype() if isinstance(kind, _NumberType) else kind
    if not NUMBER_TYPE.fullmatch(dtype.str[1:]) or len(content) != dtype.itemsize:
        raise ValueError("a numpy scalar has an invalid dtype or size")
    return np.frombuffer(content, dtype)[0]


class _Namespace:
    """Replaces argparse.Namespace while unpickling (trainers store their options in one); drops its values."""

    def __setstate__(self, state: object) -> None:
        pass


def _replaced_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return replacements for the globals in pickles of numpy scalars (numpy 1 and 2) and of a Namespace."""
    scalars = [(_number_of, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")]
    return [(_NumberType, "numpy.dtype"), *scalars, (_Namespace, "argparse.Namespace")]


def _load_or_refuse(file: IO[bytes], path: Path) -> Any:
    try:
        return load_bounded(file)
    except Exception as error:  # a damaged pickle can raise anything
        file.seek(0)
        is_known = isinstance(error, Oversized) or REFUSED.search(str(error))
        if not is_known and (text := _text_of(file.read(40))):
            what = f"the file is not a weights file but text, which begins with {text!r}"
            raise WeightsError(what, path, "give the weights file, or download it again") from None
        raise _load_error(path, error) from None


def _text_of(head: bytes) -> str:
    """Return the first bytes of a file as text; "" if they are not printable text."""
    with suppress(UnicodeDecodeError):
        text = head.decode().strip()
        return text if all(char.isprintable() or char.isspace() for char in text) else ""
    return ""


def _load_error(path: Path, error: Exception) -> WeightsError:
    message = str(error)
    if isinstance(error, Oversized):
        what = f"the file would take more memory than it has bytes: {message}"
        return WeightsError(what, path, "download it again, or save model.state_dict() as float32, float16 or bfloat16")
    if refused := REFUSED.search(message):
        what = (
            f"the file was refused and none of it was run: it calls {truncate(refused[1])}, and a weights file may "
            "hold only tensors, plain Python values and numpy scalars"
        )
        return WeightsError(what, path, "ask its author to save model.state_dict() with torch.save")
    if isinstance(error, pickle.UnpicklingError):
        message = message.partition("\n\n")[2] or message  # drop the advice to load without weights_only
    reason = next(iter(message.splitlines()), "").split(". ")[0]
    what = f"the file is not a weights file, or it is damaged or truncated ({type(error).__name__}: {truncate(reason)})"
    return WeightsError(what, path, "download it again")


def _join_parts(content: dict[Any, Any]) -> dict[Any, Any]:
    """Join the parts of a DeepLab into one dict with keys body.KEY, head.KEY and cls.KEY; return others unchanged."""
    if not all(isinstance(content.get(part), dict) for part in PARTS):
        return content
    joined = {f"{part}.{key}": value for part in PARTS for key, value in content[part].items()}
    return {**joined, **{key: value for key, value in content.items() if key not in PARTS}}


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, Tensor) for each in value.values())


def _check_is_state_dict(content: dict[Any, Any], path: str | os.PathLike[str]) -> None:
    foreign = [
        f"{key!r} ({type(value).__name__})"
        for key, value in content.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if foreign:
        what = f"the file holds no state dict: these entries are not tensors: {join_names(foreign)}"
        raise WeightsError(what, path, 'save model.state_dict(), or a dict with it under "state_dict"')


def _refuse_repeated_values(state_dict: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Raise WeightsError for tensors that repeat values with a stride of 0: a copy could have any size."""
    plain = {key: value for key, value in state_dict.items() if value.layout == torch.strided and not value.is_nested}
    if repeated := [key for key, tensor in plain.items() if tensor.nbytes > tensor.untyped_storage().nbytes()]:
        what = f"the file holds tensors with more values than it stores: {join_names(repeated)}"
        remedy = "save contiguous tensors: {key: value.contiguous() for key, value in model.state_dict().items()}"
        raise WeightsError(what, path, remedy)
