"""A cost is what a clock and a counter say, and nothing where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zoo.run import cost
from zoo.run.cost import CostMeter, total_cost

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RANGE_UJ = 262_143_328_850  # of a real package: it begins again after some minutes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves by hand."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(cost.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of two packages, of a core that is a part of one, and of the whole board, which counts both again."""
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for zone, name in names.items():
        (tmp_path / zone).mkdir()
        for file, text in {"name": name, "max_energy_range_uj": str(RANGE_UJ), "energy_uj": "5000000"}.items():
            (tmp_path / zone / file).write_text(f"{text}\n")
    monkeypatch.setattr(cost, "POWERCAP", tmp_path)
    return tmp_path


def count(powercap: Path, package: int, joules: float) -> None:
    """Let a package's counter go on, and begin again behind its largest value."""
    file = powercap / f"intel-rapl:{package}" / "energy_uj"
    file.write_text(f"{(int(file.read_text()) + int(joules * 1e6)) % (RANGE_UJ + 1)}\n")


def test_seconds_are_those_of_the_clock_and_a_cpu_has_none_of_a_gpu(clock: SimpleNamespace, tmp_path: Path) -> None:
    meter = CostMeter(CPU)
    clock.now += 12.34
    assert meter.read()["seconds"] == 12.3
    assert meter.read()["gpu_seconds"] is None


def test_the_joules_of_all_packages_add_up_without_what_is_part_of_them(powercap: Path) -> None:
    meter = CostMeter(CPU)
    count(powercap, 0, 30.0)
    count(powercap, 1, 12.5)
    for zone in ("intel-rapl:0:0", "intel-rapl:2"):
        (powercap / zone / "energy_uj").write_text("99999999999\n")
    found = meter.read()
    assert (found["joules"], found["joules_of"]) == (42.5, "all that ran on 2 CPU packages, by RAPL")


def test_a_counter_that_begins_again_is_followed(powercap: Path, clock: SimpleNamespace) -> None:
    meter = CostMeter(CPU)
    for _ in range(7):  # 700 kJ in a counter of 262 kJ
        count(powercap, 0, 100_000.0)
        clock.now += 200.0
        meter.update()
    assert meter.read()["joules"] == 700_000.0


def test_a_counter_that_could_have_gone_round_unseen_counts_nothing(powercap: Path, clock: SimpleNamespace) -> None:
    meter = CostMeter(CPU)
    clock.now += 3600.0
    found = meter.read()
    assert (found["joules"], found["joules_of"]) == (None, cost.TOO_SELDOM)
    clock.now += 1.0
    assert meter.read()["joules"] is None


def test_a_counter_that_disappears_ends_the_count_and_nothing_else(powercap: Path) -> None:
    meter = CostMeter(CPU)
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    meter.update()
    assert meter.read()["joules"] is None


def test_without_a_readable_counter_no_joules_are_recorded(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (powercap / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert CostMeter(CPU).read()["joules_of"] == cost.NO_COUNTER
    monkeypatch.setattr(cost, "POWERCAP", powercap / "missing")
    assert (CostMeter(CPU).read()["joules"], CostMeter(CPU).read()["joules_of"]) == (None, cost.NO_COUNTER)


class FakeNvml(SimpleNamespace):
    """A package like pynvml with one GPU."""

    NVMLError = RuntimeError
    mj: int | None = 7000

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        assert gpu == "GPU-1234"
        if self.mj is None:
            raise self.NVMLError("Not Supported")
        return self.mj


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(cost.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return fake


def test_a_gpu_has_seconds_and_joules(nvml: FakeNvml, clock: SimpleNamespace) -> None:
    meter = CostMeter(GPU)
    nvml.mj, clock.now = 19500, clock.now + 10.0
    wanted = {"seconds": 10.0, "gpu_seconds": 10.0, "joules": 12.5, "joules_of": "the GPU, by NVML"}
    assert meter.read() == wanted
    nvml.mj = None
    assert meter.read()["joules"] is None


def test_the_joules_of_a_gpu_that_nobody_counts_are_not_guessed(
    nvml: FakeNvml, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = CostMeter(GPU, 4)
    clock.now += 10.0
    assert (meter.read()["gpu_seconds"], meter.read()["joules"]) == (40.0, None)
    nvml.mj = None
    assert CostMeter(GPU).read()["joules_of"] == "not recorded: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert CostMeter(GPU).read()["joules_of"] == "not recorded: the package pynvml is not installed"


def test_costs_of_parts_add_up_unless_a_part_is_not_known() -> None:
    part = {"seconds": 1.5, "gpu_seconds": 3.0, "joules": 2.0, "joules_of": "the GPU, by NVML"}
    assert total_cost([part, part]) == {
        "seconds": 3.0,
        "gpu_seconds": 6.0,
        "joules": 4.0,
        "joules_of": part["joules_of"],
    }
    assert total_cost([part, {**part, "joules": None}])["joules"] is None
