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
from zoo.engine import checkpoint
from zoo.errors import CheckpointError, WeightsError
from zoo.weights import read_checkpoint, read_state_dict
from zoo.weights.read import extract_state_dict

MB = 2**20

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Runs:
    """An object whose pickle calls ``function(*args)`` when it is opened."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def save(content: Any, path: Path, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def weights() -> dict[str, Tensor]:
    return {"mod1.conv1.weight": torch.randn(4, 3, 2, 2), "mod1.bn1.num_batches_tracked": torch.tensor(7)}


def assert_same(read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    """Same keys in the same order, same values bit for bit."""
    assert list(read) == list(written)
    for key, tensor in written.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)


def message_of(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_state_dict(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 3000
    assert "Weights only load failed" not in message
    assert "weights_only" not in message.replace("``weights_only=True``", "")  # no advice to load it unsafely
    return message


@FORMATS
def test_bare_state_dict_is_read_bit_for_bit(tmp_path: Path, zipped: bool) -> None:
    written = weights() | {"half": torch.randn(3).half(), "strided": torch.randn(4, 6).t()[::2]}
    assert_same(read_state_dict(save(OrderedDict(written), tmp_path / "w.pth", zipped)), written)


def test_flipped_bit_is_found(tmp_path: Path) -> None:
    path, weights = tmp_path / "weights.pth", {"weight": torch.arange(1000.0)}
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
def test_trainer_file_with_numpy_numbers_is_read(tmp_path: Path, zipped: bool) -> None:
    written = weights()
    parameter = nn.Parameter(torch.ones(2))
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
    path = save(content, tmp_path / "checkpoint.pth.tar", zipped)
    assert_same(read_state_dict(path), written)
    read = read_checkpoint(path)
    assert (read["epoch"], read["best_prec1"], read["others"]) == (90, 78.08, [1.5, -3, True, 4, 2])


def test_numpy_numbers_pickled_by_numpy_1_are_read(tmp_path: Path) -> None:
    path = save(weights() | {"best_prec1": np.float64(78.08)}, tmp_path / "w.pth", zipped=False)
    content = path.read_bytes()
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != content or b"numpy.core.multiarray" in content
    path.write_bytes(old)
    assert read_checkpoint(path)["best_prec1"] == 78.08


@FORMATS
def test_tensors_of_gpu_are_read_to_cpu(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = weights()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(written, tmp_path / "w.pth", zipped)
    assert_same(read_state_dict(tmp_path / "w.pth"), written)  # a tensor on another device would not compare


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["module.a.weight", "module.b.weight"], ["a.weight", "b.weight"]),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["a.module.b"], ["a.module.b"]),
        (["modules.a"], ["modules.a"]),
        (["mod1.bn1.bn.weight"], ["mod1.bn1.weight"]),
        (["module.mod2.block1.convs.bn3.bn.running_var"], ["mod2.block1.convs.bn3.running_var"]),
        (["mod2.block1.proj_bn.bn.bias"], ["mod2.block1.proj_bn.bias"]),
        (["bn_out.bn.running_mean"], ["bn_out.running_mean"]),
        (["mod2.convs1.0.bn.bn.weight"], ["mod2.convs1.0.bn.weight"]),
        (["mod2.convs1.0.bn.weight"], ["mod2.convs1.0.bn.weight"]),
        (["tra2.bn.bn.num_batches_tracked"], ["tra2.bn.num_batches_tracked"]),
        (["tra2.bn.weight"], ["tra2.bn.weight"]),
        (["bn1.bn.conv.weight", "urbn.bn.weight"], ["bn1.bn.conv.weight", "urbn.bn.weight"]),
    ],
)
def test_old_keys_are_renamed(tmp_path: Path, written: list[str], read: list[str]) -> None:
    path = save({key: torch.tensor(float(i)) for i, key in enumerate(written)}, tmp_path / "w.pth")
    assert read_state_dict(path) == {key: torch.tensor(float(i)) for i, key in enumerate(read)}


def test_colliding_renamed_keys_raise(tmp_path: Path) -> None:
    path = save({"bn1.weight": torch.ones(1), "bn1.bn.weight": torch.ones(1)}, tmp_path / "w.pth")
    assert "bn1.weight twice" in message_of(path)


@FORMATS
@pytest.mark.parametrize("function", [os.system, builtins.exec], ids=["os.system", "exec"])
def test_file_with_code_raises_without_running_it(tmp_path: Path, zipped: bool, function: Callable[..., Any]) -> None:
    trace = tmp_path / "ran"
    code = f"touch {trace}" if function is os.system else f"open({str(trace)!r}, 'w').close()"
    path = save({"state_dict": weights(), "best_prec1": Runs(function, code)}, tmp_path / "w.pth", zipped)
    name = pickle.dumps(function, protocol=0).split()[1].decode()
    assert f"it calls {'posix.system' if name == 'system' else name}" in message_of(path)
    assert not trace.exists()

    torch.load(path, weights_only=False)  # shows that the file runs code when it is loaded unsafely
    assert trace.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_bare_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    path, trace = tmp_path / "w.pth", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {trace}"), protocol))
    message_of(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (np.ones(2), "multiarray._reconstruct"),
        (Path("x"), "PosixPath"),
        (Runs(getattr, "a", "upper"), "getattr"),
    ],
)
def test_other_objects_are_not_allowed(tmp_path: Path, value: Any, name: str) -> None:
    message = message_of(save({"a": torch.ones(1), "b": value}, tmp_path / "w.pth"))
    assert "refused" in message
    assert name in message


def test_reading_leaves_torchs_allowed_globals_unchanged(tmp_path: Path) -> None:
    path = save(weights(), tmp_path / "w.pth")
    with torch.serialization.safe_globals([np.dtype]):
        before = set(torch.serialization.get_safe_globals())
        read_state_dict(path)
        assert set(torch.serialization.get_safe_globals()) == before


@FORMATS
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_truncated_file_is_reported_as_truncated(tmp_path: Path, zipped: bool, kept: float) -> None:
    path = save({"a": torch.randn(5000)}, tmp_path / "w.pth", zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert "damaged or truncated" in message_of(path)


@pytest.mark.parametrize("content", [b"\n <!DOCTYPE html><html>Google Drive</html>", b"", b"\x80\x02K\x01."])
def test_file_with_other_content_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    assert "is not a weights file" in message_of(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (torch.ones(3), "holds a Tensor"),
        ({}, "holds an empty dict"),
        ({"net": weights(), "epoch": 3}, "'net' (dict), 'epoch' (int)"),
        ({"a": torch.ones(1), 3: torch.ones(1)}, "3 (Tensor)"),
        ({"body": weights(), "head": weights(), "cls": 3}, "'body' (dict), 'head' (dict), 'cls' (int)"),
        ({"state_dict": {"body": weights(), "head": {"a": [1]}, "cls": weights()}}, "'head.a' (list)"),
    ],
)
def test_torch_file_without_network_is_reported(tmp_path: Path, content: Any, said: str) -> None:
    assert said in message_of(save(content, tmp_path / "w.pth"))


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


def write_zip(file: Any, keys: Sequence[str], numel: int, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a file like torch.save, with one record of ``numel`` zeros under the first of the keys."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(keys, numel))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr(f"archive/data/{keys[0]}", bytes(4 * numel))


def compressed() -> bytes:
    file = io.BytesIO()
    write_zip(file, ["0"], 4 * MB, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def test_compressed_files_raise_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(compressed())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: pytest.fail("the entries were unpacked"))
    assert "its entry archive/data.pkl is compressed" in message_of(path)
    refused(CheckpointError, lambda: checkpoint.read(path), "archive/data.pkl")


def test_record_with_many_names_is_read_once(tmp_path: Path) -> None:
    """torch's zip reader takes aaa and AaA for the same record, and its loader for two storages."""
    keys = ["".join("aA"[int(bit)] for bit in format(i, "06b")) for i in range(64)]
    path = tmp_path / "w.pth"
    write_zip(path, keys, MB // 4)
    assert len({tensor.data_ptr() for tensor in torch.load(path, weights_only=True)}) == 64
    assert "refers to the same bytes several times" in message_of(path)
    refused(CheckpointError, lambda: checkpoint.read(path), "same bytes")


def test_false_claim_of_large_storage_raises(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(12_345)}, path, _use_new_zipfile_serialization=False)
    content, many = path.read_bytes(), 3 * 10**8
    assert content.count(b"M90") == 2
    content = content.replace(b"M90", b"J" + struct.pack("<i", many))
    path.write_bytes(content.replace(struct.pack("<q", 12_345), struct.pack("<q", many)))
    assert "damaged or truncated" in message_of(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensor_with_stride_of_0_raises(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(1).expand(10**12)}, path, _use_new_zipfile_serialization=zipped)
    assert "more values than it stores: a;" in message_of(path)


@pytest.mark.parametrize("ema", [[1, 2], torch.ones(3), "text"])
def test_moving_average_must_be_state_dict(ema: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "ema": ema}, tmp_path / "w.pth")
    assert f'holds a {type(ema).__name__} under "ema"' in message_of(tmp_path / "w.pth")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_state_dict_of_other_trainers_is_found(key: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3, key: {"module.a": torch.ones(2)}, "args": "x"}, tmp_path / "w.pth")
    assert torch.equal(read_state_dict(tmp_path / "w.pth")["a"], torch.ones(2))


MANY = b"J" + (2**31 - 1).to_bytes(4, "little") + b"\x85R"  # called with this number


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("called", ["builtins.bytearray", "__builtin__.bytearray", "torch.FloatTensor", "torch.Tensor"])
def test_pickled_allocation_raises_before_allocating(called: str, zipped: bool, tmp_path: Path) -> None:
    """A file of one kilobyte could allocate two gigabytes, or load as uninitialized memory."""
    module, _, name = called.rpartition(".")
    pickled = b"\x80\x02}X\x01\x00\x00\x00ac" + f"{module}\n{name}\n".encode() + MANY + b"s."
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            entries = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for entry, content in entries.items():
                archive.writestr(entry.upper(), pickled if entry.endswith("data.pkl") else content)
    else:
        with zipfile.ZipFile(path, "w") as archive:  # torch ignores it, because it is not at the start of the file
            archive.writestr("a/data.pkl", b"N.")
        path.write_bytes(pickled + path.read_bytes())
    refused(WeightsError, lambda: read_state_dict(path), "more memory", f"{module} {name}")


class _Calls:
    """Pickles as a call of numpy.dtype that is then given a state, and of numpy's scalar with it."""

    def __init__(self, name: str, state: Any, content: bytes) -> None:
        self.name, self.state, self.content = name, state, content

    def __reduce__(self) -> Any:
        scalar = np.float64(0).__reduce__()[0]
        return scalar, (_Dtype(self.name, self.state), self.content)


class _Dtype(_Calls):
    def __init__(self, name: str, state: Any) -> None:
        super().__init__(name, state, b"")

    def __reduce__(self) -> Any:
        return np.dtype, (self.name, False, True), self.state


@pytest.mark.parametrize("zipped", [True, False])
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
    name: str, state: Any, content: bytes, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "w.pth"
    weights = {"a": torch.ones(3), "best": _Calls(name, state, content)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError):
        read_checkpoint(path)


def test_directory_entry_raises(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(5)}, path)
    with zipfile.ZipFile(path) as archive:
        name, start = next(info.filename for info in archive.infolist() if "/data/" in info.filename), archive.start_dir
    content = bytearray(path.read_bytes())
    entry = content.index(name.encode(), start) - 46  # length of a directory entry before the name
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    refused(WeightsError, lambda: read_checkpoint(path), "damaged")


def _weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 3, generator=generator)
    return {
        "state_dict": {"a.weight": shared, "b.weight": shared[:2].t(), "count": torch.tensor(3)},
        "epoch": 3,
        "best_prec1": np.float64(75.0),
        "arch": "resnet18",
    }


def _file(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(_weights(), file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _with_pickle(pickled: bytes) -> bytes:
    """Return the file with another pickle in it and right checksums, so that the pickle is read."""
    with zipfile.ZipFile(io.BytesIO(_file(zipped=True))) as archive, zipfile.ZipFile(out := io.BytesIO(), "w") as new:
        for name in archive.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else archive.read(name))
    return out.getvalue()


def _pickle() -> bytes:
    with zipfile.ZipFile(io.BytesIO(_file(zipped=True))) as archive:
        return archive.read("archive/data.pkl")


WEIGHTS = {
    "zip": lambda: mutated([_file(zipped=True)]),
    "pickle in a sound zip": lambda: mutated([_pickle(), pickle.dumps({"a": 1})]).map(_with_pickle),
    "before zip": lambda: mutated([_file(zipped=False)]),
    "anything": lambda: st.binary(max_size=300),
}


@EXAMPLES
@pytest.mark.filterwarnings("ignore")  # torch warns of formats that a damaged file seems to have
@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_bytes_of_weights_file_give_tensors_or_error(kind: str, examples: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"

    def load(content: bytes) -> None:
        path.write_bytes(content)
        extract_state_dict(read_checkpoint(path), path)

    fuzz(load, examples, WEIGHTS[kind](), tmp_path)


TRAINED, AVERAGED = {"conv.weight": torch.zeros(2, 1, 1, 1)}, {"conv.weight": torch.ones(2, 1, 1, 1)}


def _wrapped(state_dict, prefix="module."):
    return {f"{prefix}{key}": tensor for key, tensor in state_dict.items()}


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": TRAINED, "state_dict_ema": AVERAGED},  # timm
        {"model": TRAINED, "model_ema": AVERAGED},  # ConvNeXt
        {"model": TRAINED, "model_ema": {"n_averaged": torch.tensor(3), **_wrapped(AVERAGED)}},  # torchvision
        {"n_averaged": torch.tensor(3), **_wrapped(AVERAGED)},  # an average saved alone
        {"state_dict": _wrapped(TRAINED), "ema": AVERAGED},
        {"model_ema": AVERAGED, "epoch": 3},
    ],
)
def test_moving_average_of_trainer_is_read(content, tmp_path):
    torch.save(content, tmp_path / "w.pth")
    assert torch.equal(read_state_dict(tmp_path / "w.pth")["conv.weight"], AVERAGED["conv.weight"])


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({"state_dict": {}}, []),
        ({"state_dict": TRAINED, "state_dict_ema": {}}, ["conv.weight"]),
        ({"state_dict": TRAINED, "state_dict_ema": None}, ["conv.weight"]),
        ({"state_dict": TRAINED, "ema": None}, ["conv.weight"]),
        ({"n_averaged": torch.tensor(3)}, []),
        ({"ema": torch.zeros(2), "w": torch.zeros(2)}, ["ema", "w"]),
    ],
)
def test_empty_state_dicts_and_averages_are_handled(content, keys, tmp_path):
    torch.save(content, tmp_path / "w.pth")
    assert list(read_state_dict(tmp_path / "w.pth")) == keys


def test_ignored_moving_average_is_reported(tmp_path, caplog):
    for other in ("ema_state_dict", "averaged_model", "swa"):
        torch.save({"state_dict": TRAINED, other: AVERAGED, "optimizer": {"state": {}}}, tmp_path / "w.pth")
        assert torch.equal(read_state_dict(tmp_path / "w.pth")["conv.weight"], TRAINED["conv.weight"])
        assert f"reading state_dict, and not {other};" in caplog.text


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."],
)
def test_prefixes_of_wrappers_are_dropped(prefix, tmp_path):
    torch.save(_wrapped(TRAINED, prefix), tmp_path / "w.pth")
    assert list(read_state_dict(tmp_path / "w.pth")) == ["conv.weight"]


def test_prefix_of_compiled_part_is_dropped(tmp_path):
    torch.save({"stem.weight": torch.ones(1), "body._orig_mod.weight": torch.ones(1)}, tmp_path / "w.pth")
    assert list(read_state_dict(tmp_path / "w.pth")) == ["stem.weight", "body.weight"]


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_git_lfs_pointer_error_explains_fetch(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    refused(WeightsError, lambda: read_state_dict(tmp_path / name), "git lfs pull")


class Path0:
    """An object that is not allowed in a file."""


@pytest.mark.parametrize(
    "options", [{"lr": 0.1, "model": "resnet50"}, {}, {"nested": argparse.Namespace(decay=[1, 2.5])}, {"a b": None}]
)
def test_options_of_trainer_do_not_hide_weights(options, tmp_path):
    namespace = argparse.Namespace()
    vars(namespace).update(options)
    torch.save({"model": TRAINED, "args": namespace, "epoch": 3}, tmp_path / "w.pth")
    assert list(read_state_dict(tmp_path / "w.pth")) == ["conv.weight"]
    assert vars(read_checkpoint(tmp_path / "w.pth")["args"]) == {}


def test_other_objects_in_options_raise(tmp_path):
    torch.save({"model": TRAINED, "args": argparse.Namespace(path=Path0())}, tmp_path / "w.pth")
    refused(WeightsError, lambda: read_state_dict(tmp_path / "w.pth"), "none of it was run", "Path0")


def test_namespace_cannot_be_called_with_code(tmp_path):
    class Hostile:
        def __reduce__(self):
            return argparse.Namespace, ("os.system",)

    torch.save({"model": TRAINED, "args": Hostile()}, tmp_path / "w.pth")
    with pytest.raises(WeightsError):
        read_state_dict(tmp_path / "w.pth")


def test_counters_of_thop_are_dropped_and_named(tmp_path, caplog):
    counters = {"total_ops": torch.zeros(1), "conv.total_params": torch.zeros(1)}
    torch.save({"state_dict": {**TRAINED, **counters}}, tmp_path / "w.pth")
    assert list(read_state_dict(tmp_path / "w.pth")) == ["conv.weight"]
    assert "thop (total_ops, conv.total_params)" in caplog.text


@pytest.mark.parametrize("text", ["garbage in a file", '{"arch": "resnet50"}', "<!DOCTYPE html>", "épée"])
def test_text_file_is_called_text(text, tmp_path):
    (tmp_path / "w.pth").write_text(text)
    assert "Error" not in refused(WeightsError, lambda: read_state_dict(tmp_path / "w.pth"), "is not a weights file")
