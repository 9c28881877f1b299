"""The back end is chosen once, can be forced, and says why it is not another."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from zoo.errors import ConfigError
from zoo.ops.abn import backend, kernels, native, reference, triton


@pytest.mark.parametrize("module", [reference, native, triton], ids=lambda module: module.__name__)
def test_every_back_end_has_kernels_of_contract_with_its_arguments(module):
    members = vars(kernels.Kernels).items()
    required = {name: member for name, member in members if inspect.isfunction(member) and name[0] != "_"}
    assert required.keys() == {
        "unavailable_reason",
        "statistics",
        "apply",
        "apply_",
        "backward_reduce",
        "backward_apply",
    }
    for name, contract in required.items():
        _, *expected = inspect.signature(contract).parameters.values()  # the first is self
        assert list(inspect.signature(getattr(module, name)).parameters.values()) == expected
    optional = {name: member.__doc__ for name, member in members if isinstance(member, property)}
    names = {"backward", "track_statistics", "reduce_gradients", "local_statistics", "group_statistics"}
    assert optional.keys() == names
    for name, contract in optional.items():
        kernel = getattr(module, name)
        assert kernel is None or contract.startswith(f"{name}({', '.join(inspect.signature(kernel).parameters)}): ")


def test_reference_can_be_forced_and_choice_comes_back():
    x = torch.zeros(1, 1)
    before = backend.kernels_for(x)
    with backend.forced("reference"):
        assert backend.kernels_for(x) is reference
    assert backend.kernels_for(x) is before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("native", "ZOO_KERNELS=native is not available: no compiler was found"),
        ("fast", "'fast' is not one of auto, reference, native, triton"),
    ],
)
def test_forced_but_unavailable_back_end_raises_with_its_reason(name, message, monkeypatch):
    monkeypatch.setitem(
        backend.DEVICES, "native", ("cpu", SimpleNamespace(unavailable_reason=lambda: "no compiler was found"))
    )
    with pytest.raises(ConfigError, match=message), backend.forced(name):
        pass


def test_description_says_why_back_end_is_off(monkeypatch):
    monkeypatch.setitem(backend.DEVICES, "native", ("cpu", SimpleNamespace(unavailable_reason=lambda: None)))
    assert "active" in backend.describe()["reference"]
    with backend.forced("reference"):
        assert backend.describe()["native"] == "off: ZOO_KERNELS=reference"
    monkeypatch.setitem(backend.DEVICES, "triton", ("cuda", SimpleNamespace(unavailable_reason=lambda: None)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with backend.forced("auto"):
        assert backend.describe()["triton"] == "ready, but there is no CUDA device"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_missing_kernels_warn_once_without_gpu(monkeypatch, recwarn, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    missing = SimpleNamespace(unavailable_reason=lambda: "not built")
    for name, device in (("native", "cpu"), ("triton", "cuda")):
        monkeypatch.setitem(backend.DEVICES, name, (device, missing))
    backend._warn_of_reference.cache_clear()
    with backend.forced("auto"):
        assert not recwarn.list
        assert [backend.kernels_for(torch.zeros(1)) for _ in range(2)] == [reference, reference]
    backend._warn_of_reference.cache_clear()
    assert [str(each.message)[:30] for each in recwarn.list] == ["zoo uses plain torch operation"] * (not has_gpu)


@pytest.mark.slow
def test_environment_variable_decides_at_import():
    script = "import torch; from zoo.ops.abn.backend import kernels_for; print(kernels_for(torch.zeros(1)).__name__)"
    environment = {**os.environ, "ZOO_KERNELS": "reference"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "zoo.ops.abn.reference"
