"""Reads the state dict out of a weights file without ever running code from it."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from zoo.errors import WeightsError, brief, listed, printable
from zoo.weights.cache import open_published, open_weights, weights_path

logger = logging.getLogger("zoo")

COMPRESSED = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"  # gzip, bzip2, xz
# The keys under which trainers save the state dict: this package and most others; many examples; torchvision and timm.
STATE_DICT_KEYS = "state_dict", "model_state_dict", "model"
PARTS = "body", "head", "cls"  # of the published segmentation model, each a state dict of its own
# Torch's message about a function or class that it does not let a file use.
REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
# The three records at the end of a zip archive: the 64-bit one that torch.save writes, its position, and the old one.
END_64, LOCATOR_64, END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
SAFETENSORS_HEADER_BYTES = 10**8  # the format allows no longer header
LOCAL = struct.Struct("<4s5H3L2H")  # before each entry of a zip archive
DIRECTORY = 0x10  # among the attributes of an entry
LEGACY_PICKLES = 5  # at the beginning of a file of the format before zip; what they describe follows
ALLOCATES = re.compile(r"(?:builtins|__builtin__) bytearray|torch\S* (?:\w*Tensor|UntypedStorage|TypedStorage)")
REBUILDS_DTYPE = "torch._utils _rebuild_tensor_v3"  # how a pickle makes tensors of dtypes without a storage class
# Kinds of numbers as numpy spells them in pickles, without the order of bytes.
NUMBER_TYPE = re.compile(r"[iuf][248]|[iub]1|f16", re.ASCII)
SLACK_BYTES = 2**18  # for zip directories, which are read twice
# Until July 2018 the norm classes wrapped a second module: bn1.bn.weight. A plain DenseNet key such as
# convs1.0.bn.weight has a number before its bn, so it is left alone; convs1.0.bn.bn.weight is not.
WRAPPED_NORM = re.compile(
    r"(?P<norm>(?:^|\.)(?:bn\d*|bn_out|\w+_bn))\.bn"
    r"(?P<leaf>\.(?:weight|bias|running_mean|running_var|num_batches_tracked))$"
)


class Oversized(ValueError):
    """Reading a file would take more memory than the file has bytes."""


class UnsupportedDtype(ValueError):
    """A file holds tensors of a dtype that no network of this package can take."""


def read_checkpoint(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the dict in the file at ``path`` with all that it holds, tensors on the CPU.

    The file may be a `torch.save` file, in the zip format or the one before it, with tensors, plain Python values and
    numpy numbers, or a safetensors file if the package safetensors is installed. Reading takes about as much memory as
    the file has bytes, whatever the file says. Raises WeightsError for anything else; a file that would run code is
    refused and nothing of it is run.
    """
    with open_weights(path) as file:
        return _content_of(file, Path(path))


def read_published(name: str) -> dict[Any, Any]:
    """Return the dict in the file of the published weights ``name``, which is downloaded unless it is in the cache.

    What is read is what was verified. Raises ConfigError and WeightsError as `open_published` and `read_checkpoint`.
    """
    with open_published(name) as file:
        return _content_of(file, weights_path(name))


def _content_of(file: IO[bytes], path: Path) -> dict[Any, Any]:
    """Return the dict in an open file, which ``path`` names in messages."""
    head = file.read(512)
    file.seek(0)
    # A safetensors file begins with the length of a JSON text and that text.
    is_safetensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= SAFETENSORS_HEADER_BYTES
    if not is_safetensors:
        _refuse_other_formats(path, head)
    content = _load_safetensors(file, path) if is_safetensors else _load_or_refuse(file, path)
    if not isinstance(content, dict) or not content:
        kind = "an empty dict" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise WeightsError(f"{printable(path)}: holds {kind} and no state dict; save model.state_dict()")
    return content


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the network's tensors in the file at ``path``, on the CPU, with the keys that the networks have now.

    The file holds a state dict, or a trainer's dict with a state dict under one of `STATE_DICT_KEYS`. Three state dicts
    under "body", "head" and "cls", as of the published segmentation model, become one. If that dict also
    has a moving average of the weights under "ema", the average is returned, because it is what training validated.
    A "module." before all keys and the ".bn" level of old norms are dropped. Raises WeightsError for anything else, as
    `read_checkpoint` does.
    """
    return extract_state_dict(read_checkpoint(path), path)


def extract_state_dict(content: dict[Any, Any], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return what `read_state_dict` returns, given the ``content`` of the file, which ``path`` names in messages."""
    key = next((key for key in STATE_DICT_KEYS if isinstance(content.get(key), dict)), None)
    if key is not None:
        averaged = content.get("ema")
        if averaged is not None and not isinstance(averaged, dict):
            raise WeightsError(
                f'{printable(path)}: holds a {type(averaged).__name__} under "ema", where the moving average of the '
                "weights is expected; leave it out, or save a state dict there"
            )
        if averaged is not None:
            logger.info("%s: the moving average of the weights is read, which is what training validated", path)
        content = content[key] if averaged is None else averaged
    content = _joined(content)
    _check_is_state_dict(content, path)
    _refuse_repeated_values(content, path)
    return published_keys({key: tensor.detach() for key, tensor in content.items()}, printable(path))


def published_keys(state_dict: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return ``state_dict`` with the keys of today: without "module." before all keys and without `WRAPPED_NORM`'s .bn.

    Raises WeightsError if two keys become the same.
    """
    prefix = "module." if all(key.startswith("module.") for key in state_dict) else ""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state_dict.items():
        new_key = WRAPPED_NORM.sub(r"\g<norm>\g<leaf>", key.removeprefix(prefix))
        if new_key in renamed:
            raise WeightsError(
                f"{source}: holds {brief(new_key)} twice, with and without the old .bn level ({brief(key)})"
            )
        renamed[new_key] = tensor
    return renamed


def load_bounded(file: IO[bytes]) -> Any:
    """Return the content of an open `torch.save` file: tensors, plain Python values and numpy numbers, nothing else.

    Raises Oversized if the content takes more memory than the file has bytes, with some slack, and UnsupportedDtype
    for tensors of a dtype without a storage class, such as float8. A damaged file can raise
    nearly any exception; one with checksums, which all zip files of `torch.save` have unless its user has turned them
    off, always raises one. No code in the file is run.
    """
    _check_archive(file)
    _check_pickles(file)
    metered: Any = _Metered(file)  # it has the methods of a file that torch uses
    # Names that the user has allowed are left out, so that they stay allowed when the context ends.
    allowed = [item for item in _numpy_globals() if item not in torch.serialization.get_safe_globals()]
    with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other pickle protocols and TorchScript, which load or raise
        return torch.load(metered, map_location="cpu", weights_only=True)


def _check_archive(file: IO[bytes]) -> None:
    """Raise Oversized if the zip archive in an open file is larger than the file once it is unpacked.

    torch.save never compresses. Only the archive's directory is read for that, which is short; a file of another format
    passes. The file is at its start afterwards. Raises zipfile.BadZipFile for a directory that is not where the file
    says, because torch would then read another directory than the one that was checked; and for an entry that does not
    have its checksum, which torch does not look at: wrong values would be loaded.
    """
    size = file.seek(0, os.SEEK_END)
    if not _is_archive(file):
        return
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        _check_directory(file, size, archive.start_dir)
        for entry in entries:
            if entry.external_attr & DIRECTORY:  # of which torch reads nothing, and takes the memory as it was
                raise zipfile.BadZipFile(f"{brief(entry.filename)} is a directory")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise Oversized(
                    f"its entry {brief(entry.filename)} is compressed, and unpacks to {entry.file_size:,} bytes"
                )
        if (unpacked := sum(entry.file_size for entry in entries)) > size:
            raise Oversized(f"its entries claim {unpacked:,} bytes, and the file has {size:,}")
        # torch.serialization.set_crc32_options(False) makes all of them 0.
        if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {brief(damaged)}")
    file.seek(0)


def _check_pickles(file: IO[bytes]) -> None:
    """Raise Oversized if an open `torch.save` file calls a class that makes memory of any size out of a number.

    Torch lets a file call these, and fills or leaves as it was whatever memory the number asks for. torch.save names
    one of them only for dtypes without a storage class of their own, such as float8 and uint16, which raise
    UnsupportedDtype. The file is at its start afterwards; raises ValueError for what is no pickle.
    """
    for start in _pickle_starts(file):
        if start is not None:
            file.seek(start)
        names = {str(argument) for opcode, argument, _ in pickletools.genops(file) if opcode.name == "GLOBAL"}
        if allocating := next(filter(ALLOCATES.fullmatch, names), None):
            if REBUILDS_DTYPE in names and (dtypes := sorted(filter(_is_dtype, names))):
                raise UnsupportedDtype(listed(name.replace(" ", ".") for name in dtypes))
            raise Oversized(f"it calls {brief(allocating)}, which can take any amount")
    file.seek(0)


def _is_dtype(name: str) -> bool:
    """Return whether a name in a pickle, such as "torch uint16", is that of a dtype."""
    module, _, attribute = name.partition(" ")
    return module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)


def _pickle_starts(file: IO[bytes]) -> list[int] | list[None]:
    """Return where the pickles of an open `torch.save` file begin; None for one that follows the one before."""
    if not _is_archive(file):
        return [None] * LEGACY_PICKLES
    starts = []
    with zipfile.ZipFile(file) as archive:  # torch looks for names in small and in capital letters
        places = [entry.header_offset for entry in archive.infolist() if entry.filename.lower().endswith("/data.pkl")]
    for place in places:
        file.seek(place)
        *_, name_length, extra_length = LOCAL.unpack(file.read(LOCAL.size))
        starts.append(place + LOCAL.size + name_length + extra_length)
    return starts


def _is_archive(file: IO[bytes]) -> bool:
    """Return whether torch takes an open file for a zip archive; the file is at its start afterwards."""
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    return magic == b"PK\x03\x04"


def _check_directory(file: IO[bytes], size: int, start: int) -> None:
    """Raise zipfile.BadZipFile unless every reader finds the zip directory at ``start``, and no other one."""
    end = size - END.size
    file.seek(end)
    signature, *_, length, offset, comment = END.unpack(file.read(END.size))
    if signature != b"PK\x05\x06" or comment:
        raise zipfile.BadZipFile("the file does not end where its zip archive ends")
    locator = end - LOCATOR_64.size
    file.seek(max(0, locator))
    signature, _, position, _ = LOCATOR_64.unpack(file.read(LOCATOR_64.size))
    if signature == b"PK\x06\x07":
        end = locator - END_64.size
        file.seek(max(0, end))
        signature, *_, length, offset = END_64.unpack(file.read(END_64.size))
        if signature != b"PK\x06\x06" or position != end:
            raise zipfile.BadZipFile("the zip directory is not where the file says")
    if offset != start or offset + length != end:
        raise zipfile.BadZipFile("the zip directory is not where the file says")


class _Metered:
    """An open file that raises Oversized once more bytes have been read from it than it has.

    A pickle can refer to one part of a file by many names, and torch reads it into new memory for each name.
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
            raise Oversized("it names the same bytes several times")


def _refuse_other_formats(path: Path, head: bytes) -> None:
    """Raise WeightsError for files that are often mistaken for weights: a saved web page, an archive, an empty file."""
    if not head:
        raise WeightsError(f"{printable(path)}: is empty; download it again")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
        raise WeightsError(
            f"{printable(path)}: is a web page, not weights; the download stopped at a page that asks for confirmation "
            "or reports an error: open it in a browser and download the file from there"
        )
    if head[257:262] == b"ustar" or head.startswith(COMPRESSED):
        raise WeightsError(
            f"{printable(path)}: is an archive; unpack it and give the weights file inside "
            "(the published .pth.tar files are none, despite their name)"
        )


def _load_safetensors(file: IO[bytes], path: Path) -> Any:
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError:
        raise WeightsError(
            f"{printable(path)}: is a safetensors file, which needs a package that is not installed: pip install "
            "safetensors, or convert the file where it is: torch.save(safetensors.torch.load_file(FILE), NEW)"
        ) from None
    try:
        return safetensors.load(file.read())
    except Exception as error:  # of the package's own kinds
        raise _load_error(path, error) from None


class _NumberType:
    """Stands in for numpy.dtype in a pickle: the name of a kind of number, and the order of its bytes.

    numpy believes what a pickle says of a dtype, and reads wherever it points to.
    """

    def __init__(self, name: str, *_: Any) -> None:
        self._name, self._order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    def to_dtype(self) -> np.dtype[Any]:
        if not NUMBER_TYPE.fullmatch(self._name) or self._order not in ("<", ">", "=", "|"):
            raise ValueError(f"{brief(self._name)} is no kind of number")
        order: Any = self._order  # one of those that numpy knows
        return np.dtype(self._name).newbyteorder(order)


def _number_of(kind: _NumberType | np.dtype[Any], content: bytes) -> Any:
    """Return the number that a pickle calls numpy's `scalar` for; the user may have let it use numpy.dtype itself."""
    dtype = kind.to_dtype() if isinstance(kind, _NumberType) else kind
    if not NUMBER_TYPE.fullmatch(dtype.str[1:]) or len(content) != dtype.itemsize:
        raise ValueError("what a numpy number is made of is no number")
    return np.frombuffer(content, dtype)[0]


def _numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return what the pickle of a numpy number uses, by the names that numpy 1 and 2 have for it."""
    modules = "numpy.core.multiarray", "numpy._core.multiarray"
    return [(_NumberType, "numpy.dtype"), *((_number_of, f"{module}.scalar") for module in modules)]


def _load_or_refuse(file: IO[bytes], path: Path) -> Any:
    try:
        return load_bounded(file)
    except Exception as error:  # a damaged pickle can raise anything
        _refuse_programs(file, path)
        raise _load_error(path, error) from None


def _refuse_programs(file: IO[bytes], path: Path) -> None:
    """Raise WeightsError for a file of torch.export or ONNX, which holds a network to run and is no weights file."""
    kind = runs_with = None
    if path.suffix == ".onnx":
        kind, runs_with = "ONNX", "an ONNX runtime"
    else:
        names = _names_in_archive(file)
        if {"archive_format", "models/model.json"} <= names:
            kind, runs_with = "torch.export", "torch.export.load"
    if kind is not None:
        raise WeightsError(
            f"{printable(path)}: is an exported network ({kind}) and no weights file; run it with {runs_with}, or give "
            "the weights file that it was made from"
        )


def _names_in_archive(file: IO[bytes]) -> set[str]:
    """Return the names in a zip archive without the folder that all are in; none for a damaged or another file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OSError):
        return set()


def _load_error(path: Path, error: Exception) -> WeightsError:
    message, where = str(error), printable(path)
    if isinstance(error, Oversized):
        return WeightsError(
            f"{where}: would take more memory than the file has bytes: {message}; torch.save writes no such file: "
            "download it again, or have whoever made it save model.state_dict() with torch.save"
        )
    if isinstance(error, UnsupportedDtype):
        return WeightsError(
            f"{where}: holds tensors of a dtype that no network of this package can take ({message}); save them as "
            "float32, float16 or bfloat16"
        )
    if refused := REFUSED.search(message):
        return WeightsError(
            f"{where}: refused, and nothing of it was run: opening it would call {brief(refused[1])}, and a weights "
            "file may hold only tensors, plain Python values and numpy numbers; whoever made it can save "
            "model.state_dict() with torch.save instead"
        )
    if isinstance(error, pickle.UnpicklingError):
        message = message.partition("\n\n")[2] or message  # the part before it advises to load unsafely
    reason = next(iter(message.splitlines()), "").split(". ")[0]
    return WeightsError(
        f"{where}: is no weights file that torch can read, or is damaged or cut short "
        f"({type(error).__name__}: {brief(reason)}); download it again"
    )


def _joined(content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the tensors of a DeepLab's three parts under one name each, body.KEY and so on; other content as it is."""
    if not all(isinstance(content.get(part), dict) for part in PARTS):
        return content
    joined = {f"{part}.{key}": value for part in PARTS for key, value in content[part].items()}
    return {**joined, **{key: value for key, value in content.items() if key not in PARTS}}


def _check_is_state_dict(content: dict[Any, Any], path: str | os.PathLike[str]) -> None:
    foreign = [
        f"{key!r} ({type(value).__name__})"
        for key, value in content.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if foreign:
        raise WeightsError(
            f"{printable(path)}: holds no state dict: these entries are not tensors: {listed(foreign)}; "
            'save model.state_dict(), or a dict with it under "state_dict"'
        )


def _refuse_repeated_values(state_dict: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Raise WeightsError for a tensor that repeats its values by a stride of 0, since a copy could have any size."""
    plain = {key: value for key, value in state_dict.items() if value.layout == torch.strided and not value.is_nested}
    if repeated := [key for key, tensor in plain.items() if tensor.nbytes > tensor.untyped_storage().nbytes()]:
        raise WeightsError(
            f"{printable(path)}: holds tensors with more values than the file has: {listed(repeated)}; "
            "save contiguous ones: {key: value.contiguous() for key, value in model.state_dict().items()}"
        )
