"""Safetensors files are readable by every program and read like other weights files; damage raises a clear error."""

from __future__ import annotations

import json
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import zoo
from tests.faults.fuzz import EXAMPLES, fuzz, mutated
from tests.refusals import refused
from tests.weights.files import save_described
from zoo.cli import main
from zoo.config.record import NetworkRecord
from zoo.errors import WeightsError
from zoo.weights import read_checkpoint, read_state_dict, read_weights
from zoo.weights._read import extract_state_dict
from zoo.weights._safetensors_files import safetensors_bytes

pytestmark = pytest.mark.usefixtures("small_networks")

pytest.importorskip("safetensors")
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def write(path: Path, header: Any, content: bytes = b"\0" * 4, length: int | None = None) -> Path:
    """Write a safetensors file with any header, and any length of the header in its first eight bytes."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + content)
    return path


def check_refusal(path: Path, *names: str) -> None:
    message = refused(WeightsError, lambda: zoo.get("resnet18", weights=path), str(path), *names)
    assert message.replace("\n", "").isprintable()
    assert len(message) < 1000


def test_missing_package_raises_with_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    header = json.dumps({"a": ENTRY}).encode()
    for path, spaces in (tmp_path / "w.safetensors", 0), (tmp_path / "w.pth", 60 - len(header)):
        write(path, header + b" " * spaces)  # a length of 60 is the character <
        check_refusal(path, "pip install safetensors")
    torch.save(zoo.get("resnet18").state_dict(), tmp_path / "source.pth")
    target = tmp_path / "new.safetensors"
    assert main(["convert", "export", str(tmp_path / "source.pth"), str(target), "--arch", "resnet18"]) == 2
    assert "pip install safetensors" in capsys.readouterr().err
    assert not target.exists()


@pytest.fixture
def network(tmp_path: Path) -> Any:
    """A small network, whose weights and description are in source.pth."""
    torch.manual_seed(0)
    network = zoo.get("revnet38_cifar", norm="inplace", num_classes=3)
    save_described(network, tmp_path / "source.pth", class_names=["a", "b", "c"])
    return network


def export(folder: Path, *options: str) -> Path:
    target = folder / "weights.safetensors"
    assert main(["convert", "export", str(folder / "source.pth"), str(target), *options]) == 0
    return target


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) and tensor.dtype == other[key].dtype for key, tensor in one.items())


def test_exported_file_is_plain_state_dict_and_describes_its_network(
    network: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = export(tmp_path)
    assert "export revnet38_cifar: exact, the weights are unchanged" in capsys.readouterr().out
    assert_same(load_file(path), network.state_dict())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    source, stored = read_weights(tmp_path / "source.pth"), read_weights(path)
    assert json.loads(metadata["network"]) == source.content["network"]
    assert stored.spec == source.spec
    again = zoo.get(path)
    assert_same(again.state_dict(), network.state_dict())
    assert again.built_as.norm == "inplace"
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"class_names +\['a', 'b', 'c'\]\n", shown)


def test_conversions_read_and_write_both_formats(network: Any, tmp_path: Path) -> None:
    path = export(tmp_path)
    for target in "standard.pth", "standard.safetensors":
        command = ["convert", "inplace-to-standard", str(path), str(tmp_path / target)]
        assert main(command) == 0
    one, other = (read_weights(tmp_path / name) for name in ("standard.pth", "standard.safetensors"))
    assert_same(one.state_dict, other.state_dict)
    assert one.spec == other.spec
    assert torch.load(tmp_path / "standard.pth", weights_only=True)["network"]["norm"] == "standard"


def test_training_checkpoint_is_written_without_its_training_state(tmp_path: Path) -> None:
    network = zoo.get("resnet32_cifar", num_classes=2)
    averaged = {key: tensor + 1 for key, tensor in network.state_dict().items()}
    described = network.built_as.model_dump(mode="json")
    content = {"state_dict": network.state_dict(), "ema": averaged, "network": described, "optimizer": {"a": 1}}
    torch.save(content, tmp_path / "source.pth")
    assert_same(read_checkpoint(export(tmp_path))["state_dict"], averaged)


def test_tied_strided_and_short_tensors_are_written_in_full() -> None:
    from safetensors.torch import load

    table = torch.randn(4, 6)
    tensors = {"a": table, "b": table, "part": table[1:], "strided": table.t()[::2], "none": torch.empty(0)}
    tensors |= {"half": torch.randn(3).bfloat16(), "counter": torch.tensor(7), "flag": torch.tensor(True)}
    assert_same(load(safetensors_bytes(tensors)), tensors)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.empty(2, device="meta")]
)
def test_unsupported_tensors_raise(tensor: Tensor) -> None:
    refused(WeightsError, lambda: safetensors_bytes({"a": tensor}), "safetensors", ".pth")


UNKNOWN = {"arch": "x", "norm": "standard", "activation": "relu", "activation_param": 0.01, "options": {}}


def network_in(text: str) -> dict[str, Any]:
    return {"a": ENTRY, "__metadata__": {"network": text}}


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tensors": (lambda path: write(path, {}, b""), "an empty dict"),
    "content is short": (lambda path: write(path, {"a": ENTRY}, b"\0" * 3), "damaged or truncated"),
    "header is cut": (lambda path: path.write_bytes(write(path, {"a": ENTRY}).read_bytes()[:30]), "truncated"),
    "header is huge": (lambda path: write(path, {"a": ENTRY}, length=2**60), "damaged or truncated"),
    "dtype is odd": (lambda path: write(path, {"a": {**ENTRY, "dtype": "F8_E5M2", "shape": [4]}}), "float8_e5m2"),
    "metadata is a number": (lambda path: write(path, {"a": ENTRY, "__metadata__": {"network": 1}}), "damaged"),
    "network is not JSON": (lambda path: write(path, network_in("resnet18")), "not a JSON object"),
    "network is a list": (lambda path: write(path, network_in("[1]")), "not a JSON object"),
    "network is deep": (lambda path: write(path, network_in("[" * 100_000)), "not a JSON object"),
    "network is wrong": (lambda path: write(path, network_in('{"arch": "resnet18", "norm": "x"}')), "lacks"),
    "network is unknown": (lambda path: write(path, network_in(json.dumps(UNKNOWN))), "no such network"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "damaged or truncated"),
    "a file of torch": (lambda path: torch.save({"a": torch.ones(1)}, path), "damaged or truncated"),
    "a web page": (lambda path: path.write_bytes(b"<html>"), "damaged or truncated"),
    "an empty file": (lambda path: path.write_bytes(b""), "damaged or truncated"),
    "of another network": (lambda path: write(path, {"a": ENTRY}), "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_file_is_one_clear_error_and_nothing_is_unpickled(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, name = DAMAGED[kind]
    make(path := tmp_path / "w.safetensors")
    monkeypatch.setattr("zoo.weights._read.load_bounded", lambda file: pytest.fail("the file was unpickled"))
    check_refusal(path, name)


def test_tensors_do_not_change_with_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_bytes({"a": torch.ones(1000)}))
    read = read_state_dict(path)
    path.write_bytes(b"")
    assert torch.equal(read["a"], torch.ones(1000))


@EXAMPLES
def test_any_bytes_give_tensors_or_error(examples: int, tmp_path: Path) -> None:
    record = NetworkRecord(spec=zoo.get("resnet32_cifar").built_as)
    sound = safetensors_bytes({"a": torch.randn(3), "b": torch.tensor(7)}, record)
    path = tmp_path / "w.safetensors"

    def load(content: bytes) -> None:
        path.write_bytes(content)
        extract_state_dict(read_checkpoint(path), path)

    load(sound)  # imports the package
    fuzz(load, examples, mutated([sound]) | st.binary(max_size=300), tmp_path)
