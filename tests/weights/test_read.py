"""Reading weights files of every format; hostile files run no code, take bounded memory and raise one clear error."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.faults.fuzz import EXAMPLES, fuzz, mutated
from tests.refusals import refused
from zoo.engine import _checkpoint as checkpoint
from zoo.errors import CheckpointError, WeightsError
from zoo.weights import read_checkpoint, read_state_dict
from zoo.weights._read import extract_state_dict

MB = 2**20
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Runs:
    """An object whose pickle calls ``function(*args)`` when it is opened."""

    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


def save(content: Any, path: Path, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.pth"


def weights() -> dict[str, Tensor]:
    return {"mod1.conv1.weight": torch.randn(4, 3, 2, 2), "mod1.bn1.num_batches_tracked": torch.tensor(7)}


def assert_same(read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    """Same keys in the same order, same values bit for bit."""
    assert list(read) == list(written)
    for key, tensor in written.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)


def message_of(path: Path, *names: str) -> str:
    message = refused(WeightsError, lambda: read_state_dict(path), *names)
    assert message.isprintable()
    assert len(message) < 3000
    assert "Weights only load failed" not in message
    assert "weights_only" not in message.replace("``weights_only=True``", "")  # no advice to load it unsafely
    return message


@FORMATS
def test_bare_state_dict_is_read_bit_for_bit(path: Path, zipped: bool) -> None:
    written = weights() | {"half": torch.randn(3).half(), "strided": torch.randn(4, 6).t()[::2]}
    assert_same(read_state_dict(save(OrderedDict(written), path, zipped)), written)


def test_flipped_bit_is_found(path: Path) -> None:
    weights = {"weight": torch.arange(1000.0)}
    for is_checked in (True, False):
        torch.serialization.set_crc32_options(is_checked)
        try:
            torch.save(weights, path)
        finally:
            torch.serialization.set_crc32_options(True)
        assert torch.equal(read_state_dict(path)["weight"], weights["weight"])
        content = bytearray(path.read_bytes())
        content[content.index(weights["weight"].numpy().tobytes()) + 5] ^= 1
        path.write_bytes(content)
        if is_checked:
            refused(WeightsError, lambda: read_state_dict(path), "checksum", "data/0")
        else:
            assert not torch.equal(read_state_dict(path)["weight"], weights["weight"])


@FORMATS
def test_trainer_file_with_numpy_numbers_is_read(path: Path, zipped: bool) -> None:
    written, parameter = weights(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    content = {
        "epoch": 90,
        "arch": "resnext101",
        "state_dict": OrderedDict((f"module.{key}", tensor) for key, tensor in written.items()),
        "best_prec1": np.float64(78.08),
        "others": [np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(4), np.float16(2)],
        "optimizer": optimizer.state_dict(),
    }
    assert_same(read_state_dict(save(content, path, zipped)), written)
    if not zipped:  # numpy 1 has another name for the module
        content_bytes = path.read_bytes()
        assert b"numpy._core.multiarray" in content_bytes or b"numpy.core.multiarray" in content_bytes
        path.write_bytes(content_bytes.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    read = read_checkpoint(path)
    assert (read["epoch"], read["best_prec1"], read["others"]) == (90, 78.08, [1.5, -3, True, 4, 2])


@FORMATS
def test_tensors_of_gpu_are_read_to_cpu(path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = weights()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(written, path, zipped)
    assert_same(read_state_dict(path), written)  # a tensor on another device would not compare


TRAINED, AVERAGED = {"conv.weight": torch.zeros(2, 1, 1, 1)}, {"conv.weight": torch.ones(2, 1, 1, 1)}
OPTIONS = argparse.Namespace(lr=0.1, model="resnet50", nested=argparse.Namespace(decay=[1, 2.5]), **{"a b": None})


def wrapped(state_dict: dict[str, Tensor], prefix: str = "module.") -> dict[str, Tensor]:
    return {f"{prefix}{key}": tensor for key, tensor in state_dict.items()}


#: The content of a file of another trainer -> its weights.
FOREIGN: dict[str, tuple[Any, dict[str, Tensor]]] = {
    **{key: ({"epoch": 3, key: wrapped(TRAINED), "args": "x"}, TRAINED) for key in (
        "state_dict", "model_state_dict", "model")},
    **{prefix: (wrapped(TRAINED, prefix), TRAINED) for prefix in (
        "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.")},
    "options": ({"model": TRAINED, "args": OPTIONS, "epoch": 3}, TRAINED),
    "no options": ({"model": TRAINED, "args": argparse.Namespace()}, TRAINED),
    "timm": ({"state_dict": TRAINED, "state_dict_ema": AVERAGED}, AVERAGED),
    "ConvNeXt": ({"model": TRAINED, "model_ema": AVERAGED}, AVERAGED),
    "torchvision": ({"model": TRAINED, "model_ema": {"n_averaged": torch.tensor(3), **wrapped(AVERAGED)}}, AVERAGED),
    "average saved alone": ({"n_averaged": torch.tensor(3), **wrapped(AVERAGED)}, AVERAGED),
    "average of wrapper": ({"state_dict": wrapped(TRAINED), "ema": AVERAGED}, AVERAGED),
    "average without weights": ({"model_ema": AVERAGED, "epoch": 3}, AVERAGED),
    "empty average": ({"state_dict": TRAINED, "state_dict_ema": {}}, TRAINED),
    "average is None": ({"state_dict": TRAINED, "state_dict_ema": None}, TRAINED),
    "ema is None": ({"state_dict": TRAINED, "ema": None}, TRAINED),
    "no tensors": ({"state_dict": {}}, {}),
    "counter alone": ({"n_averaged": torch.tensor(3)}, {}),
    "parameter named ema": ({"ema": torch.zeros(2), "w": torch.ones(2)}, {"ema": torch.zeros(2), "w": torch.ones(2)}),
}  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), FOREIGN.values(), ids=FOREIGN.keys())
def test_weights_of_other_trainers_are_found(content: Any, expected: dict[str, Tensor], path: Path) -> None:
    assert_same(read_state_dict(save(content, path)), expected)
    if isinstance(content.get("args"), argparse.Namespace):
        assert vars(read_checkpoint(path)["args"]) == {}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["module.a.weight", "module.b.weight"], ["a.weight", "b.weight"]),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        (["module.a", "b"], None),
        (["a.module.b"], None),
        (["modules.a"], None),
        (["stem.weight", "body._orig_mod.weight"], ["stem.weight", "body.weight"]),
        (["mod1.bn1.bn.weight"], ["mod1.bn1.weight"]),
        (["module.mod2.block1.convs.bn3.bn.running_var"], ["mod2.block1.convs.bn3.running_var"]),
        (["mod2.block1.proj_bn.bn.bias"], ["mod2.block1.proj_bn.bias"]),
        (["bn_out.bn.running_mean"], ["bn_out.running_mean"]),
        (["mod2.convs1.0.bn.bn.weight"], ["mod2.convs1.0.bn.weight"]),
        (["mod2.convs1.0.bn.weight"], None),
        (["tra2.bn.bn.num_batches_tracked"], ["tra2.bn.num_batches_tracked"]),
        (["tra2.bn.weight"], None),
        (["bn1.bn.conv.weight", "urbn.bn.weight"], None),
    ],
)
def test_old_keys_are_renamed(path: Path, written: list[str], read: list[str] | None) -> None:
    save({key: torch.tensor(float(i)) for i, key in enumerate(written)}, path)
    assert read_state_dict(path) == {key: torch.tensor(float(i)) for i, key in enumerate(read or written)}


def test_dropped_content_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for other in ("ema_state_dict", "averaged_model", "swa"):
        save({"state_dict": TRAINED, other: AVERAGED, "optimizer": {"state": {}}}, path)
        assert_same(read_state_dict(path), TRAINED)
        assert f"reading state_dict, and not {other};" in caplog.text
    counters = {"total_ops": torch.zeros(1), "conv.total_params": torch.zeros(1)}
    assert_same(read_state_dict(save({"state_dict": {**TRAINED, **counters}}, path)), TRAINED)
    assert "thop (total_ops, conv.total_params)" in caplog.text


@FORMATS
@pytest.mark.parametrize("function", [os.system, builtins.exec], ids=["os.system", "exec"])
def test_file_with_code_raises_without_running_it(path: Path, zipped: bool, function: Callable[..., Any]) -> None:
    trace = path.with_name("ran")
    code = f"touch {trace}" if function is os.system else f"open({str(trace)!r}, 'w').close()"
    save({"state_dict": weights(), "best_prec1": Runs(function, code)}, path, zipped)
    name = pickle.dumps(function, protocol=0).split()[1].decode()
    message_of(path, f"it calls {'posix.system' if name == 'system' else name}")
    assert not trace.exists()

    torch.load(path, weights_only=False)  # shows that the file runs code when it is loaded unsafely
    assert trace.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_bare_malicious_pickle_does_not_run(path: Path, protocol: int) -> None:
    trace = path.with_name("ran")
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {trace}"), protocol))
    message_of(path)
    assert not trace.exists()


def test_reading_leaves_torchs_allowed_globals_unchanged(path: Path) -> None:
    save(weights(), path)
    with torch.serialization.safe_globals([np.dtype]):
        before = set(torch.serialization.get_safe_globals())
        read_state_dict(path)
        assert set(torch.serialization.get_safe_globals()) == before


@FORMATS
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_truncated_file_is_reported_as_truncated(path: Path, zipped: bool, kept: float) -> None:
    content = save({"a": torch.randn(5000)}, path, zipped).read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    message_of(path, "damaged or truncated")


class Path0:
    """An object that is not allowed in a file."""


#: The content of a file, bytes or an object to save -> what its error names.
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "web page": (b"\n <!DOCTYPE html><html>Google Drive</html>", ("not a weights file but text",)),
    "empty": (b"", ("is not a weights file",)),
    "pickled number": (b"\x80\x02K\x01.", ("is not a weights file",)),
    "text": (b"garbage in a file", ("not a weights file but text",)),
    "JSON": (b'{"arch": "resnet50"}', ("not a weights file but text",)),
    "accents": ("épée".encode(), ("not a weights file but text",)),
    "pointer of git": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", ("git lfs pull",)),
    "tensor": (torch.ones(3), ("holds a Tensor",)),
    "empty dict": ({}, ("holds an empty dict",)),
    "no state dict": ({"net": TRAINED, "epoch": 3}, ("'net' (dict), 'epoch' (int)",)),
    "number as key": ({"a": torch.ones(1), 3: torch.ones(1)}, ("3 (Tensor)",)),
    "parts": ({"body": TRAINED, "head": TRAINED, "cls": 3}, ("'body' (dict), 'head' (dict), 'cls' (int)",)),
    "list in part": ({"state_dict": {"body": TRAINED, "head": {"a": [1]}, "cls": TRAINED}}, ("'head.a' (list)",)),
    "colliding keys": ({"bn1.weight": torch.ones(1), "bn1.bn.weight": torch.ones(1)}, ("bn1.weight twice",)),
    "average is a list": ({"state_dict": TRAINED, "ema": [1, 2]}, ('holds a list under "ema"',)),
    "average is a tensor": ({"state_dict": TRAINED, "ema": torch.ones(3)}, ('holds a Tensor under "ema"',)),
    "average is text": ({"state_dict": TRAINED, "ema": "text"}, ('holds a str under "ema"',)),
    "module": ({**TRAINED, "b": nn.Linear(1, 1)}, ("refused", "torch.nn.modules.linear.Linear")),
    "array": ({**TRAINED, "b": np.ones(2)}, ("refused", "multiarray._reconstruct")),
    "path": ({**TRAINED, "b": Path("x")}, ("refused", "PosixPath")),
    "call of getattr": ({**TRAINED, "b": Runs(getattr, "a", "upper")}, ("refused", "getattr")),
    "object in options": ({**TRAINED, "args": argparse.Namespace(path=Path0())}, ("none of it was run", "Path0")),
    "call of options": ({"model": TRAINED, "args": Runs(argparse.Namespace, "os.system")}, ()),
}  # fmt: skip


@pytest.mark.parametrize(("content", "names"), REFUSED.values(), ids=REFUSED.keys())
def test_file_without_weights_is_named(content: Any, names: tuple[str, ...], path: Path) -> None:
    path.write_bytes(content) if isinstance(content, bytes) else save(content, path)
    message_of(path, str(path), *names)
    if b"git-lfs" in path.read_bytes():
        refused(WeightsError, lambda: read_state_dict(path.rename(path.with_suffix(".safetensors"))), *names)


def pickled(keys: Sequence[str], numel: int) -> bytes:
    """The pickle of a list of tensors of float32, each in the storage of its key."""
    tensors = b""
    for key in keys:
        tensors += (
            b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
            + b"X" + struct.pack("<I", len(key)) + key.encode()
            + b"X\x03\x00\x00\x00cpuJ" + struct.pack("<i", numel) + b"tQK\x00J" + struct.pack("<i", numel)
            + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
        )  # fmt: skip
    return b"\x80\x02](" + tensors + b"e."


def write_zip(file: Path, keys: Sequence[str], numel: int, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a file like torch.save, with one record of ``numel`` zeros under the first of the keys."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(keys, numel))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr(f"archive/data/{keys[0]}", bytes(4 * numel))


def test_compressed_files_raise_before_they_are_unpacked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip(path, ["0"], 4 * MB, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: pytest.fail("the entries were unpacked"))
    message_of(path, "its entry archive/data.pkl is compressed")
    refused(CheckpointError, lambda: checkpoint.read(path), "archive/data.pkl")


def test_record_with_many_names_is_read_once(path: Path) -> None:
    """torch's zip reader takes aaa and AaA for the same record, and its loader for two storages."""
    write_zip(path, ["".join("aA"[int(bit)] for bit in format(i, "06b")) for i in range(64)], MB // 4)
    assert len({tensor.data_ptr() for tensor in torch.load(path, weights_only=True)}) == 64
    message_of(path, "refers to the same bytes several times")
    refused(CheckpointError, lambda: checkpoint.read(path), "same bytes")


def test_false_claim_of_large_storage_raises(path: Path) -> None:
    content, many = save({"a": torch.zeros(12_345)}, path, zipped=False).read_bytes(), 3 * 10**8
    assert content.count(b"M90") == 2
    content = content.replace(b"M90", b"J" + struct.pack("<i", many))
    path.write_bytes(content.replace(struct.pack("<q", 12_345), struct.pack("<q", many)))
    message_of(path, "damaged or truncated")


@FORMATS
def test_tensor_with_stride_of_0_raises(path: Path, zipped: bool) -> None:
    message_of(save({"a": torch.zeros(1).expand(10**12)}, path, zipped), "more values than it stores: a;")


MANY = b"J" + (2**31 - 1).to_bytes(4, "little") + b"\x85R"  # called with this number


def with_pickle(content: bytes, pickled: bytes, rename: Callable[[str], str] = str) -> bytes:
    """Return a zip file with another pickle in it and right checksums, so that the pickle is read."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out := io.BytesIO(), "w") as new:
        for name in archive.namelist():
            new.writestr(rename(name), pickled if name.endswith("data.pkl") else archive.read(name))
    return out.getvalue()


@FORMATS
@pytest.mark.parametrize("called", ["builtins.bytearray", "__builtin__.bytearray", "torch.FloatTensor", "torch.Tensor"])
def test_pickled_allocation_raises_before_allocating(called: str, zipped: bool, path: Path) -> None:
    """A file of one kilobyte could allocate two gigabytes, or load as uninitialized memory."""
    module, _, name = called.rpartition(".")
    pickled = b"\x80\x02}X\x01\x00\x00\x00ac" + f"{module}\n{name}\n".encode() + MANY + b"s."
    content = save({"a": torch.ones(1)}, path, zipped).read_bytes()
    if zipped:
        path.write_bytes(with_pickle(content, pickled, str.upper))
    else:
        with zipfile.ZipFile(path, "w") as archive:  # torch ignores it, because it is not at the start of the file
            archive.writestr("a/data.pkl", b"N.")
        path.write_bytes(pickled + path.read_bytes())
    refused(WeightsError, lambda: read_state_dict(path), "more memory", f"{module} {name}")


@FORMATS
@pytest.mark.parametrize(
    ("name", "state", "content"),
    [
        ("O8", (3, "|", None, None, None, -1, -1, 63), b"\1" * 8),
        ("O8", None, b"\1" * 8),
        ("M8", (3, ">", None, None, None, 0, -1, 0), b"\1" * 8),
        ("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0), b"\1" * 8),
        ("f8", (3, "<", None, None, None, -1, -1, 0), b"\1" * 7),
        ("f8", (3, "x", None, None, None, -1, -1, 0), b"\1" * 8),
        ("f8", (), b"\1" * 8),
    ],
)
def test_numpy_number_with_foreign_pointer_raises(
    name: str, state: Any, content: bytes, zipped: bool, path: Path
) -> None:
    scalar, dtype = np.float64(0).__reduce__()[0], Runs(np.dtype, name, False, True, state=state)
    save({"a": torch.ones(3), "best": Runs(scalar, dtype, content)}, path, zipped)
    refused(WeightsError, lambda: read_checkpoint(path))


def test_directory_entry_raises(path: Path) -> None:
    save({"a": torch.arange(5)}, path)
    with zipfile.ZipFile(path) as archive:
        name, start = next(info.filename for info in archive.infolist() if "/data/" in info.filename), archive.start_dir
    content = bytearray(path.read_bytes())
    entry = content.index(name.encode(), start) - 46  # length of a directory entry before the name
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    refused(WeightsError, lambda: read_checkpoint(path), "damaged")


def _file(zipped: bool) -> bytes:
    shared = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    state_dict = {"a.weight": shared, "b.weight": shared[:2].t(), "count": torch.tensor(3)}
    content = {"state_dict": state_dict, "epoch": 3, "best_prec1": np.float64(75.0), "arch": "resnet18"}
    torch.save(content, file := io.BytesIO(), _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _pickles() -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(_file(zipped=True))) as archive:
        return [archive.read("archive/data.pkl"), pickle.dumps({"a": 1})]


WEIGHTS = {
    "zip": lambda: mutated([_file(zipped=True)]),
    "pickle in a sound zip": lambda: mutated(_pickles()).map(lambda pickled: with_pickle(_file(zipped=True), pickled)),
    "before zip": lambda: mutated([_file(zipped=False)]),
    "anything": lambda: st.binary(max_size=300),
}


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # torch warns of formats that a damaged file seems to have
@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_bytes_of_weights_file_give_tensors_or_error(kind: str, examples: int, path: Path) -> None:
    def load(content: bytes) -> None:
        path.write_bytes(content)
        extract_state_dict(read_checkpoint(path), path)

    fuzz(load, examples, WEIGHTS[kind](), path.parent)
