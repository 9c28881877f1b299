"""Reading weights files: every form they come in, and nothing in them is ever run."""

import builtins
import hashlib
import io
import os
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo.errors import WeightsError
from zoo.weights import md5_of, read_checkpoint, read_state_dict

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
    assert message.startswith(f"{path}: ")
    assert "Weights only load failed" not in message
    assert "weights_only" not in message.replace("``weights_only=True``", "")  # no advice to load it unsafely
    return message


@FORMATS
def test_a_bare_state_dict_is_read_bit_for_bit(tmp_path: Path, zipped: bool) -> None:
    written = weights() | {"half": torch.randn(3).half(), "strided": torch.randn(4, 6).t()[::2]}
    assert_same(read_state_dict(save(OrderedDict(written), tmp_path / "w.pth", zipped)), written)


def test_a_flipped_bit_is_found_unless_the_writer_has_turned_checksums_off(tmp_path: Path) -> None:
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
            with pytest.raises(WeightsError, match=r"wrong checksum of .*data/0"):
                read_state_dict(path)
        else:
            assert not torch.equal(read_state_dict(path)["weight"], weights["weight"])


@FORMATS
def test_a_trainer_file_with_numpy_numbers_is_read(tmp_path: Path, zipped: bool) -> None:
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


def test_the_moving_average_of_a_trainer_file_is_what_is_read(tmp_path: Path) -> None:
    averaged = weights()
    assert_same(read_state_dict(save({"state_dict": weights(), "ema": averaged}, tmp_path / "a.pth.tar")), averaged)
    trained = weights()
    assert_same(read_state_dict(save({"state_dict": trained, "ema": None}, tmp_path / "b.pth.tar")), trained)


def test_numpy_numbers_pickled_by_numpy_1_are_read(tmp_path: Path) -> None:
    path = save(weights() | {"best_prec1": np.float64(78.08)}, tmp_path / "w.pth", zipped=False)
    content = path.read_bytes()
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != content or b"numpy.core.multiarray" in content
    path.write_bytes(old)
    assert read_checkpoint(path)["best_prec1"] == 78.08


@FORMATS
def test_tensors_of_a_gpu_are_read_to_the_cpu(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = weights()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(written, tmp_path / "w.pth", zipped)
    assert_same(read_state_dict(tmp_path / "w.pth"), written)  # a tensor on another device would not compare


def test_another_pickle_protocol_is_read_without_a_warning(tmp_path: Path) -> None:
    written = weights()
    torch.save(written, tmp_path / "w.pth", pickle_protocol=3)
    assert_same(read_state_dict(tmp_path / "w.pth"), written)


def test_parameters_are_read_as_plain_tensors(tmp_path: Path) -> None:
    read = read_state_dict(save({"fc.weight": nn.Parameter(torch.ones(2))}, tmp_path / "w.pth"))
    assert type(read["fc.weight"]) is Tensor
    assert not read["fc.weight"].requires_grad


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
def test_old_keys_become_those_of_the_networks(tmp_path: Path, written: list[str], read: list[str]) -> None:
    path = save({key: torch.tensor(float(i)) for i, key in enumerate(written)}, tmp_path / "w.pth")
    assert read_state_dict(path) == {key: torch.tensor(float(i)) for i, key in enumerate(read)}


def test_two_keys_that_become_one_are_refused(tmp_path: Path) -> None:
    path = save({"bn1.weight": torch.ones(1), "bn1.bn.weight": torch.ones(1)}, tmp_path / "w.pth")
    assert "bn1.weight twice" in message_of(path)


@FORMATS
@pytest.mark.parametrize("function", [os.system, builtins.exec], ids=["os.system", "exec"])
def test_a_file_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, zipped: bool, function: Callable[..., Any]
) -> None:
    trace = tmp_path / "ran"
    code = f"touch {trace}" if function is os.system else f"open({str(trace)!r}, 'w').close()"
    path = save({"state_dict": weights(), "best_prec1": Runs(function, code)}, tmp_path / "w.pth", zipped)
    name = pickle.dumps(function, protocol=0).split()[1].decode()
    assert f"would call {'posix.system' if name == 'system' else name}" in message_of(path)
    assert not trace.exists()

    torch.load(path, weights_only=False)  # that the file does run code when it is loaded carelessly
    assert trace.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_bare_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
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
def test_nothing_beside_tensors_plain_values_and_numpy_numbers_is_allowed(
    tmp_path: Path, value: Any, name: str
) -> None:
    message = message_of(save({"a": torch.ones(1), "b": value}, tmp_path / "w.pth"))
    assert "refused" in message
    assert name in message


def test_reading_leaves_the_allowed_globals_of_torch_as_they_were(tmp_path: Path) -> None:
    path = save(weights(), tmp_path / "w.pth")
    with torch.serialization.safe_globals([np.dtype]):
        before = set(torch.serialization.get_safe_globals())
        read_state_dict(path)
        assert set(torch.serialization.get_safe_globals()) == before


@FORMATS
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_a_file_that_was_cut_short_is_named_as_such(tmp_path: Path, zipped: bool, kept: float) -> None:
    path = save({"a": torch.randn(5000)}, tmp_path / "w.pth", zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert "damaged or cut short" in message_of(path)


def write_tar(path: Path, mode: str) -> None:
    """Write a tar archive with a real weights file in it."""
    inner = io.BytesIO()
    torch.save(weights(), inner)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        entry = tarfile.TarInfo("w.pth")
        entry.size = inner.tell()
        inner.seek(0)
        archive.addfile(entry, inner)


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_a_real_tar_is_told_apart_from_the_pth_tar_files(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "w.pth.tar"
    write_tar(path, mode)
    assert "is an archive; unpack it" in message_of(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n <!DOCTYPE html><html>Google Drive - Virus scan warning</html>", "is a web page"),
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no weights file"),
        (b"\x80\x02K\x01.", "is no weights file"),
    ],
)
def test_a_file_that_holds_something_else_is_named_as_such(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    assert said in message_of(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert "No such file" in message_of(tmp_path / "gone.pth")
    assert "Is a directory" in message_of(tmp_path)


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
def test_a_torch_file_without_a_network_is_named_as_such(tmp_path: Path, content: Any, said: str) -> None:
    assert said in message_of(save(content, tmp_path / "w.pth"))


def test_md5_is_that_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(os.urandom(3 * 2**20 + 17))
    assert md5_of(path) == hashlib.md5(path.read_bytes()).hexdigest()
    with pytest.raises(WeightsError, match=r"gone\.pth: cannot be read"):
        md5_of(tmp_path / "gone.pth")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64])
def test_numbers_that_no_network_takes_are_refused_for_that_reason(
    tmp_path: Path, dtype: torch.dtype, zipped: bool
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.ones(2), "b": torch.ones(2).to(dtype)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError) as caught:
        read_state_dict(path)
    assert f"dtype that no network of this package can take ({dtype}); save them as float32" in str(caught.value)
    assert "memory" not in str(caught.value)
