"""Fit reports include the margin, and the largest batch is the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.memory.fit import Fit, largest_fitting
from zoo.remat._lean import lean


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 4))


def tokens(batch: int, device: str = "cpu") -> Tensor:
    return torch.randn(batch, 256, 64, device=device)


def report_of(batch: int, **options: Any) -> zoo.MemoryReport:
    return zoo.memory_report(network().to("meta"), tokens(batch, "meta"), **options)


def test_fit_is_printed_with_margin() -> None:
    assert str(Fit(14.2e9, 24 * 10**9)) == "fits: 14.2 GB of 24 GB, 9.8 GB left"
    assert str(Fit(30.1e9, 24 * 10**9)) == "does not fit: 30.1 GB of 24 GB, 6.1 GB too much"
    assert str(Fit(float("inf"), 24 * 10**9)) == "does not fit: out of memory"
    assert [bool(Fit(peak, 24)) for peak in (23, 24, 25, float("inf"))] == [True, True, False, False]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lean_training_fits_where_plain_training_does_not(device: str) -> None:
    report = zoo.memory_report(network().to(device), tokens(32, device))
    between = round((report.peak + report.plain_peak) / 2)
    assert report.fits(between)
    assert not report.fits(between, plain=True)
    assert report.fits(f"{between} B").peak == report.peak


def test_report_with_budget_describes_training_within_budget() -> None:
    without, within = report_of(32), report_of(32, budget=0.5)
    between = round((without.peak + within.peak) / 2)
    assert within.fits(between)
    assert not without.fits(between)


def test_state_of_optimizer_counts_once() -> None:
    model, x = lean(network()), tokens(4)
    before = zoo.memory_report(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after = zoo.memory_report(model, x)
    parameters = sum(each.nbytes for each in model.parameters())
    assert after.peak == before.peak + parameters
    assert [report.fits("1GB", optimizer_states=1).peak for report in (before, after)] == [after.peak, after.peak]
    assert before.fits("1GB", optimizer_states=2).peak == before.peak + 2 * parameters
    limit = before.peak + 80 * parameters
    assert before.largest_batch(limit, optimizer_states=1) == after.largest_batch(limit, optimizer_states=1)
    assert before.largest_batch(limit, optimizer_states=80) == 4 < before.largest_batch(limit)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {
    "SGD": (torch.optim.SGD, 0),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 1),
    "Adam": (torch.optim.Adam, 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_limit_leaves_room_for_state_of_optimizer(name: str) -> None:
    build, copies = OPTIMIZERS[name]
    model = lean(nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU()))))
    x, optimizer = torch.randn(1024, 256), build(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    free = zoo.memory_report(model, x)
    state_bytes = copies * sum(each.nbytes for each in model.parameters())
    limit = round(free.peak) - 10**6
    report = zoo.memory_report(model, x, budget=limit)
    assert state_bytes < report.peak <= limit


@pytest.mark.parametrize("options", [{}, {"budget": 0.5}, {"budget": 0.7}, {"plain": True}], ids=str)
def test_largest_batch_fits_and_the_next_does_not(options: dict[str, Any]) -> None:
    budget = {key: value for key, value in options.items() if key == "budget"}
    asked = {key: value for key, value in options.items() if key == "plain"}
    found = report_of(4, **budget).largest_batch("50MB", **asked)
    assert found > 16
    assert report_of(found, **budget).fits("50MB", **asked)
    assert not report_of(found + 1, **budget).fits("50MB", **asked)


def test_largest_batch_within_budget_can_train() -> None:
    found = report_of(4, budget="40MB").largest_batch("24GB")
    assert report_of(found, budget="40MB").fits("40MB")
    refused(ConfigError, lambda: report_of(found + max(2, found // 20), budget="40MB"), "at least")


def test_network_is_counted_on_meta_device() -> None:
    model = network()
    before = [each.clone() for each in (*model.parameters(), *model.buffers())]
    found = zoo.memory_report(model, tokens(2)).largest_batch("50MB")
    assert found == report_of(2).largest_batch("50MB")
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert not any(each.is_meta for each in model.parameters())


def test_inputs_with_length_of_batch_grow_with_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(1, 64)  # an attribute is copied to the meta device, too
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor, *, mask: Tensor, positions: Tensor) -> Tensor:
            return (self.layer(x + self.table) * mask + positions).exp()

    model, batch = Pair(), {"mask": torch.ones(3, 1), "positions": torch.ones(64)}
    report = zoo.memory_report(model, torch.randn(3, 64), **batch)
    found = report.largest_batch("10MB")
    larger = [
        zoo.memory_report(model, torch.randn(size, 64), mask=torch.ones(size, 1), positions=torch.ones(64))
        for size in (found, found + 1)
    ]
    assert [bool(each.fits("10MB")) for each in larger] == [True, False]


def test_one_sample_may_be_the_largest_batch() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()).to("meta"), tokens(2, "meta")
    one, two = (zoo.memory_report(model, x[:size]).peak for size in (1, 2))
    assert zoo.memory_report(model, x).largest_batch(round((one + two) / 2)) == 1
    assert zoo.memory_report(model, x).largest_batch("20KB") == 0


def test_no_batch_fits_if_norm_needs_two_samples_and_two_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()).to("meta")
    assert zoo.memory_report(model, torch.randn(4, 64, device="meta")).largest_batch("20KB") == 0


@pytest.mark.parametrize("memory", [1, 9, 10, 1000, 12345])
@pytest.mark.parametrize("power", [1, 2])
def test_largest_number_is_found_by_interpolation(memory: int, power: int) -> None:
    def bytes_for(number: int) -> int:
        return max(9, 3 * number**power - 40)

    expected = max((number for number in range(2, 5000) if bytes_for(number) <= memory), default=0)
    assert largest_fitting(bytes_for, memory, power) == expected


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "has_stepped"), [("cpu", True), ("meta", False)])
def test_optimizer_and_its_released_gradients_are_counted(device: str, has_stepped: bool) -> None:
    with torch.device(device):
        model, x = linears(), torch.ones(4, 128)
    parameters = sum(each.nbytes for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    if has_stepped:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = zoo.memory_report(model, x, optimizer=optimizer)
    assert kept.peak == pytest.approx(4 * parameters, rel=0.1)  # parameters, two states, gradients
    zoo.release_gradients(model, optimizer)
    released = zoo.memory_report(model, x, optimizer=optimizer)
    assert released.plain_peak == kept.plain_peak
    assert 3 * parameters < released.peak < 3.6 * parameters
    assert released.fits(int(3.6 * parameters))
    assert not kept.fits(int(3.6 * parameters))
    limit = 4 * parameters
    largest = released.largest_batch(limit)
    assert largest > kept.largest_batch(limit)
    with torch.device(device):
        assert zoo.memory_report(model, torch.ones(largest, 128), optimizer=optimizer).fits(limit)
        assert not zoo.memory_report(model, torch.ones(largest + 1, 128), optimizer=optimizer).fits(limit)
    assert all(each.grad is None for each in model.parameters())
