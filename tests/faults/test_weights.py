"""Weights files made to do harm or by accident odd: refused at little cost, with one clear error, or read rightly."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from zoo.cli import main
from zoo.engine import checkpoint
from zoo.errors import CheckpointError, WeightsError, ZooError
from zoo.weights import cache as weights_cache
from zoo.weights import load_weights, read_checkpoint, read_state_dict, read_weights
from zoo.weights.cache import audit_cache, open_weights, weights_path
from zoo.weights.published import published
from zoo.weights.read import read_published

NAME = "resnet34_ipabn-sync_lr_512"
MB = 2**20


def refused(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        read_state_dict(path)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


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
    """Write what torch.save does, with one record of ``numel`` zeros that is called by the first of the keys."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(keys, numel))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr(f"archive/data/{keys[0]}", bytes(4 * numel))


def compressed() -> bytes:
    file = io.BytesIO()
    write_zip(file, ["0"], 4 * MB, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def overlapping() -> bytes:
    """A hundred entries that claim to be the same megabyte."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled([str(i) for i in range(100)], MB // 4))
        archive.writestr("archive/data/0", bytes(MB))
        entry = archive.infolist()[-1]
        for i in range(1, 100):
            twin = zipfile.ZipInfo(f"archive/data/{i}")
            twin.header_offset, twin.CRC = entry.header_offset, entry.CRC
            twin.file_size = twin.compress_size = MB
            archive.filelist.append(twin)
        archive._didModify = True
    return file.getvalue()


def two_directories() -> bytes:
    """An archive that Python's reader takes for small, while torch's finds a directory with a compressed record."""
    file = io.BytesIO()
    write_zip(file, ["0"], 4 * MB, zipfile.ZIP_DEFLATED)
    bomb = file.getvalue()
    *_, count, _, length, offset, _ = struct.unpack("<4s4H2LH", bomb[-22:])

    def end_64(count: int, length: int, offset: int) -> bytes:
        return struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)

    content = bomb[:-22]
    position = len(content)
    content += end_64(count, length, offset)
    first = bomb[offset : offset + 46 + len("archive/data.pkl")]  # the entry of the pickle, said to be stored
    sizes = struct.pack("<2L", 100, 100)
    harmless = first[:10] + b"\x00\x00" + first[12:20] + sizes + first[28:]
    harmless = harmless[:30] + b"\x00" * 4 + harmless[34:]
    start = len(content)
    content += harmless
    content += end_64(1, len(harmless), start)
    content += struct.pack("<4sLQL", b"PK\x06\x07", 0, position, 1)
    return content + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(harmless), 0xFFFFFFFF, 0)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (compressed, "its entry archive/data.pkl is compressed"),
        (overlapping, "its entries claim "),
        (two_directories, "the zip directory is not where the file says"),
        (lambda: compressed() + b"more", "BadZipFile"),
    ],
)
def test_what_would_unpack_to_more_than_the_file_is_refused_before_torch_sees_it(
    build: Callable[[], bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(build())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    assert said in refused(path)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: pytest.fail("the entries were unpacked"))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        checkpoint.read(path)
    assert said in str(caught.value)


def test_two_directories_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    """Python sees one small stored entry, and torch the tensor."""
    path = tmp_path / "w.pth"
    path.write_bytes(two_directories())
    with zipfile.ZipFile(path) as archive:
        assert [(entry.compress_type, entry.file_size) for entry in archive.infolist()] == [(zipfile.ZIP_STORED, 100)]
    assert torch.load(path, weights_only=True)[0].shape == (4 * MB,)


def test_a_record_called_by_many_names_is_not_read_for_each(tmp_path: Path) -> None:
    """torch's zip reader takes aaa and AaA for the same record, and its loader for two storages."""
    keys = ["".join("aA"[int(bit)] for bit in format(i, "06b")) for i in range(64)]
    path = tmp_path / "w.pth"
    write_zip(path, keys, MB // 4)
    assert len({tensor.data_ptr() for tensor in torch.load(path, weights_only=True)}) == 64
    assert "names the same bytes several times" in refused(path)
    with pytest.raises(CheckpointError, match="names the same bytes several times"):
        checkpoint.read(path)


def test_an_old_file_that_claims_a_large_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(12_345)}, path, _use_new_zipfile_serialization=False)
    content, many = path.read_bytes(), 3 * 10**8
    assert content.count(b"M90") == 2
    content = content.replace(b"M90", b"J" + struct.pack("<i", many))
    path.write_bytes(content.replace(struct.pack("<q", 12_345), struct.pack("<q", many)))
    assert "damaged or cut short" in refused(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_that_repeats_its_values_by_a_stride_of_0_is_refused(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(1).expand(10**12)}, path, _use_new_zipfile_serialization=zipped)
    assert "more values than the file has: a;" in refused(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_many_small_and_of_shared_tensors_are_read(tmp_path: Path, zipped: bool) -> None:
    shared = torch.randn(1000)
    written = {f"k{i}": torch.tensor(float(i)) for i in range(500)} | {"a": shared, "b": shared, "c": shared[::2]}
    torch.save(written, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    read = read_state_dict(tmp_path / "w.pth")
    assert all(torch.equal(read[key], tensor) for key, tensor in written.items())
    assert read["a"].data_ptr() == read["b"].data_ptr()


def published_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """Put a file into a cache as the published weights NAME."""
    monkeypatch.setenv("ZOO_CACHE", str(cache))
    (path := weights_path(NAME)).parent.mkdir(parents=True)
    torch.save(zoo.get(NAME).state_dict(), path)
    monkeypatch.setattr(published()[NAME], "md5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, and nothing that a listing shows."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("load", [lambda: zoo.get(NAME, pretrained=True), lambda: zoo.get("resnet34", weights=NAME)])
def test_every_load_of_published_weights_compares_the_md5(
    load: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = published_file(monkeypatch, tmp_path)
    load_weights(zoo.get(NAME), NAME)
    assert os.listdir(path.parent) == [path.name]  # nothing is kept that a later load could believe
    flip(path)
    with pytest.raises(WeightsError, match=r"the md5 is .* remove it and run zoo fetch"):
        load()


def test_what_is_loaded_is_what_was_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another file that takes the name between the check and the reading is not read."""
    path = published_file(monkeypatch, tmp_path)
    check_md5 = weights_cache.check_md5

    def check_and_swap(*args: Any) -> None:
        check_md5(*args)
        torch.save({"other": torch.ones(1)}, other := tmp_path / "other.pth")
        other.replace(path)

    monkeypatch.setattr(weights_cache, "check_md5", check_and_swap)
    assert "other" not in read_published(NAME)
    assert "other" in read_state_dict(path)


def test_a_pipe_in_the_place_of_weights_does_not_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    (path := weights_path(NAME)).parent.mkdir(parents=True)
    os.mkfifo(path)
    assert [(finding.status, "no regular file" in finding.note) for finding in audit_cache()] == [("damaged", True)]
    with pytest.raises(WeightsError, match="no regular file"):
        zoo.get(NAME, pretrained=True)


def test_a_link_to_weights_is_followed(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"weights")
    (tmp_path / "link.pth").symlink_to("w.pth")
    with open_weights(tmp_path / "link.pth") as file:
        assert file.read() == b"weights"


@pytest.mark.parametrize("ema", [[1, 2], torch.ones(3), "text"])
def test_a_moving_average_that_is_no_state_dict_is_an_error(ema: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "ema": ema}, tmp_path / "w.pth")
    assert f'holds a {type(ema).__name__} under "ema"' in refused(tmp_path / "w.pth")


@pytest.mark.parametrize("weights", [[], 3, b"x", {"a": torch.ones(1)}, "a\0b"])
def test_weights_that_are_no_path_are_an_error(weights: Any) -> None:
    with pytest.raises(ZooError, match=r"weights must be the path|cannot be read"):
        zoo.get("resnet18", weights=weights)


@pytest.mark.parametrize(
    "content",
    [
        {f"key {i}": i for i in range(100_000)},
        {"k" * 10**6 + str(i): i for i in range(3)},
        {"a\x1b[31m\nb": 1},
        {("x" * 10**6,): torch.ones(1)},
    ],
)
def test_the_message_about_many_or_long_entries_is_short_and_in_one_line(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    message = refused(tmp_path / "w.pth")
    assert "these entries are not tensors" in message
    assert message.isprintable()


def test_long_names_of_refused_functions_and_odd_file_names_are_cut_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "w\x1b[31m.pth"
    name = b"n" * 3000
    path.write_bytes(b"\x80\x02c" + name + b"\nrun\n.")
    message = refused(path)
    assert message.isprintable()
    assert "w\\x1b[31m.pth" in message
    assert "n" * 300 not in message


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_is_found_where_other_trainers_put_it(key: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3, key: {"module.a": torch.ones(2)}, "args": "x"}, tmp_path / "w.pth")
    assert torch.equal(read_state_dict(tmp_path / "w.pth")["a"], torch.ones(2))


def write_safetensors(path: Path, header: bytes = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.0))


def test_a_safetensors_file_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for path, spaces in (tmp_path / "w.safetensors", 0), (tmp_path / "w.pth", 60 - len(header)):
        write_safetensors(path, header + b" " * spaces)  # a length of 60 is the character <
        assert "is a safetensors file" in refused(path)
        assert "pip install safetensors" in refused(path)


def test_a_safetensors_file_is_read_where_the_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(content: bytes) -> dict[str, Tensor]:
        if len(content) < 66:
            raise ValueError("header too large")
        return {"a": torch.tensor(struct.unpack("<f", content[-4:]))}

    package = ModuleType("safetensors.torch")
    monkeypatch.setattr(package, "load", load, raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", package)
    write_safetensors(tmp_path / "w.safetensors")
    assert read_checkpoint(tmp_path / "w.safetensors") == {"a": torch.tensor([2.0])}
    (tmp_path / "short.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:30])
    assert "damaged or cut short (ValueError: header too large)" in refused(tmp_path / "short.safetensors")


def test_a_web_page_in_the_place_of_weights_is_still_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"\xef\xbb\xbf\n<!DOCTYPE html>")
    assert "is a web page" in refused(tmp_path / "w.pth")


def lying_files() -> dict[str, Any]:
    """Checkpoints with the tensors of a small network, beside a claim that they belong to one of 3,000 blocks."""
    small = zoo.get("resnet32_cifar")
    own = small.built_as.model_dump(mode="json")
    lie = {"arch": "irevnet_cifar", "options": {"blocks": [1000] * 3}}
    config = {"network": {**lie, "classes": 10, "activation": "leaky_relu"}}
    state_dict = small.state_dict()
    return {
        "record": {"state_dict": state_dict, "network": {**own, **lie}},
        "config": {"state_dict": state_dict, "config": config},
        "both": {"state_dict": state_dict, "network": {**own, **lie}, "config": config, "format_version": 1},
        "config beside an honest record": {
            "state_dict": state_dict,
            "network": own,
            "config": config,
            "format_version": 1,
        },
        "sizes": {
            "state_dict": state_dict,
            "network": {**own, "arch": "revnext_flat", "options": {"channels": 512}},
        },
    }


@pytest.mark.parametrize("kind", ["record", "config", "both", "config beside an honest record", "sizes"])
def test_a_small_file_that_claims_a_large_network_is_refused_before_anything_is_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.pth"
    torch.save(lying_files()[kind], path)

    def must_not_run(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a network was built")

    monkeypatch.setattr("zoo.registry._build", must_not_run)
    monkeypatch.setattr(torch.nn.Module, "to_empty", must_not_run)
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"has 3,000 layers or blocks|says two things of its network|does not fit"):
        zoo.get(path)
    for command in (["validate", str(path), str(tmp_path)], ["convert", "fold", str(path), str(tmp_path / "t.pth")]):
        assert main(command) == 2
        assert "w.pth: " in capsys.readouterr().err
    assert time.monotonic() - start < 10


def test_a_config_of_another_trainer_beside_a_record_says_nothing(finished: Any, tmp_path: Path) -> None:
    content = read_checkpoint(finished.checkpoint)
    kept = {"state_dict": content["state_dict"], "network": content["network"]}
    torch.save({**kept, "config": {"lr": 0.1}}, tmp_path / "w.pth")
    assert main(["validate", str(tmp_path / "w.pth"), str(finished.data), "-j", "0"]) == 0


@pytest.mark.parametrize("network", [{"type": "resnet", "depth": 50}, [1], "resnet50", {}])
def test_what_another_trainer_keeps_under_network_is_no_record(network: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "network": network}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").spec is None


def test_a_classifier_that_is_a_single_number_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18", num_classes=2)
    state_dict = {**model.state_dict(), "classifier.fc.weight": torch.tensor(1.0)}
    torch.save({"state_dict": state_dict, "network": model.built_as.model_dump(mode="json")}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"w.pth: classifier\.fc\.weight is a single number"):
        zoo.get(tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"classifier\.fc\.weight is a single number"):
        zoo.convert.fold(state_dict, "resnet18")
    torch.save(state_dict, tmp_path / "bare.pth")
    command = ["convert", "fold", str(tmp_path / "bare.pth"), str(tmp_path / "t.pth"), "--arch", "resnet18"]
    assert main(command) == 2
    assert "bare.pth: classifier.fc.weight is a single number" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"channels": 4096}, {"layers": "many"}, {"layers": [10**4] * 3}])
def test_a_record_of_impossible_sizes_is_refused_with_the_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.get("revnext_flat")
    record = {**model.built_as.model_dump(mode="json"), "options": options}
    torch.save({"state_dict": model.state_dict(), "network": record}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"w\.pth: network: "):
        zoo.get(tmp_path / "w.pth")


def test_weights_for_images_of_other_channels_say_what_they_are_too(tmp_path: Path) -> None:
    model = zoo.get("resnet18", num_classes=2, in_chans=1)
    torch.save(
        {"state_dict": model.state_dict(), "network": model.built_as.model_dump(mode="json")}, tmp_path / "w.pth"
    )
    assert zoo.get(tmp_path / "w.pth", in_chans=1).in_chans == 1


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own loader
def test_an_exported_network_is_named_as_such(tmp_path: Path) -> None:
    zoo.convert.export(torch.nn.Conv2d(3, 1, 1), tmp_path / "net.pt2", 8)
    assert "is an exported network (torch.export) and no weights file" in refused(tmp_path / "net.pt2")
    (tmp_path / "net.onnx").write_bytes(b"\x08\n\x12\x07pytorch\x1a\x0c2.15.0")
    assert "is an exported network (ONNX) and no weights file; run it with an ONNX" in refused(tmp_path / "net.onnx")
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "damaged or cut short" in refused(tmp_path / "cut.pth")


def test_a_state_dict_or_swapped_arguments_get_a_short_message() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ZooError, match=r"model\.load_state_dict") as caught:
        zoo.get("resnet18", weights=model.state_dict())
    assert "tensor(" not in str(caught.value)
    with pytest.raises(WeightsError, match=r"the network comes first.*zoo\.load_weights\(model, FILE\)"):
        load_weights("z18.pth", model)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1, 1e300])
def test_a_file_of_two_kinds_of_number_is_folded_and_zoo_is_not_blamed(factor: float, tmp_path: Path) -> None:
    """The first tensor is in float64, the others are not: their rounding is what counts."""
    model = zoo.get("resnet18", num_classes=2)
    state_dict = {**model.state_dict(), "mod1.conv1.weight": model.mod1.conv1.weight.detach().double() * factor}
    torch.save({"state_dict": state_dict, "network": model.built_as.model_dump(mode="json")}, tmp_path / "w.pth")
    assert main(["convert", "fold", str(tmp_path / "w.pth"), str(tmp_path / "t.pth")]) == 0


def test_weights_beyond_float32_are_blamed_on_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18", num_classes=2)
    mean = torch.full((64,), 1e300, dtype=torch.float64)
    state_dict = {**model.state_dict(), "mod1.bn1.running_mean": mean}
    torch.save({"state_dict": state_dict, "network": model.built_as.model_dump(mode="json")}, tmp_path / "w.pth")
    assert main(["convert", "fold", str(tmp_path / "w.pth"), str(tmp_path / "t.pth")]) == 2
    message = capsys.readouterr().err
    assert "are not finite" in message
    assert "fault of zoo" not in message


MANY = b"J" + (2**31 - 1).to_bytes(4, "little") + b"\x85R"  # called with this number


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("called", ["builtins.bytearray", "__builtin__.bytearray", "torch.FloatTensor", "torch.Tensor"])
def test_a_pickle_that_asks_for_memory_by_a_number_is_refused_before_it_gets_any(
    called: str, zipped: bool, tmp_path: Path
) -> None:
    """A kilobyte took two gigabytes, or was loaded as a tensor of whatever the memory held."""
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
        with zipfile.ZipFile(path, "w") as archive:  # which torch does not look at, as it is not where the file begins
            archive.writestr("a/data.pkl", b"N.")
        path.write_bytes(pickled + path.read_bytes())
    with pytest.raises(WeightsError, match=rf"would take more memory than the file has.*calls {module} {name}"):
        read_state_dict(path)


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
def test_a_numpy_number_that_points_elsewhere_is_refused_and_does_not_end_the_process(
    name: str, state: Any, content: bytes, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "w.pth"
    weights = {"a": torch.ones(3), "best": _Calls(name, state, content)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError):
        read_checkpoint(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_numpy_numbers_are_read_as_they_are(zipped: bool, tmp_path: Path) -> None:
    kinds = "?bhilBHILefdg"
    numbers = [np.dtype(kind).type(1) for kind in kinds]
    torch.save({"a": torch.ones(3), "numbers": numbers}, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    read = read_checkpoint(tmp_path / "w.pth")["numbers"]
    assert [(type(number), number) for number in read] == [(type(number), number) for number in numbers]


def test_an_entry_that_says_it_is_a_directory_is_refused_and_not_read_as_whatever_the_memory_held(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(5)}, path)
    with zipfile.ZipFile(path) as archive:
        name, start = next(info.filename for info in archive.infolist() if "/data/" in info.filename), archive.start_dir
    content = bytearray(path.read_bytes())
    entry = content.index(name.encode(), start) - 46  # the length of an entry of the directory, before the name
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="damaged"):
        read_checkpoint(path)
