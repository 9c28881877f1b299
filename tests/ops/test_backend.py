"""The back end is selected once, can be forced, and explains why others are unavailable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.ops import backend


def test_reference_can_be_forced_temporarily():
    x = torch.zeros(1, 1)
    before = backend.back_end_for(x)
    with backend.force_back_end("reference"):
        assert backend.back_end_for(x) == "reference"
    assert backend.back_end_for(x) == before


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("native", ["ZOO_KERNELS=native", "no compiler was found"]),
        ("fast", ["'fast'", "auto, reference, native, triton"]),
    ],
)
def test_forced_but_unavailable_back_end_raises_with_its_reason(name, names, monkeypatch):
    monkeypatch.setitem(backend.DEVICES, "native", ("cpu", lambda: "no compiler was found"))
    refused(ConfigError, backend.force_back_end(name).__enter__, *names)


def test_description_explains_inactive_back_end(monkeypatch):
    monkeypatch.setitem(backend.DEVICES, "native", ("cpu", lambda: None))
    assert "active" in backend.describe()["reference"]
    with backend.force_back_end("reference"):
        assert backend.describe()["native"] == "off: ZOO_KERNELS=reference"
    monkeypatch.setitem(backend.DEVICES, "triton", ("cuda", lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with backend.force_back_end("auto"):
        assert backend.describe()["triton"] == "ready, but there is no CUDA device"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_kernels_the_first_norm_on_cpu_warns_once_unless_there_is_gpu(monkeypatch, recwarn, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name, device in (("native", "cpu"), ("triton", "cuda")):
        monkeypatch.setitem(backend.DEVICES, name, (device, lambda: "not built"))
    backend._warn_of_reference.cache_clear()
    with backend.force_back_end("auto"):
        assert not recwarn.list
        assert [backend.back_end_for(torch.zeros(1)) for _ in range(2)] == ["reference"] * 2
    backend._warn_of_reference.cache_clear()
    assert [str(each.message)[:30] for each in recwarn.list] == ["zoo uses plain torch operation"] * (not has_gpu)


@pytest.mark.slow
def test_environment_variable_decides_at_import():
    script = "import torch; from zoo.ops import backend; print(backend.back_end_for(torch.zeros(1)))"
    environment = {**os.environ, "ZOO_KERNELS": "reference"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reference"
