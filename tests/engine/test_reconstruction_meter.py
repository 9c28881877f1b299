"""The reconstruction meter reports every so many steps what each block of a chain found again, and changes no run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from zoo.engine.reconstruction import reconstruction_errors
from zoo.layers import ReversibleBlock, ReversibleSequential
from zoo.spec.network import NetworkSpec

NUM_BLOCKS = 3


class _Scale(nn.Module):
    """Multiplies with a number that is another one in each call: what it added cannot be taken away again."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.drift, self.calls = drift, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.drift * self.calls)


def _branch() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))


def _reversible_net(network: NetworkSpec) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        ReversibleSequential([ReversibleBlock(_branch(), _branch()) for _ in range(NUM_BLOCKS)]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, network.num_classes),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


def test_errors_are_logged_at_the_interval_for_each_block_and_only_when_asked(data: Path, tmp_path: Path) -> None:
    log, silent = MemoryLog(), MemoryLog()
    run(make_config(training={"reconstruction_meter": 4}), data, tmp_path / "a", log, build=_reversible_net)
    run(make_config(), data, tmp_path / "b", silent, build=_reversible_net)
    assert [step for step, _ in log.reconstructions] == [4, 8, 12]
    for _, errors in log.reconstructions:
        assert errors.keys() == {f"1/{index}" for index in range(NUM_BLOCKS)}
        assert all(0 <= error < 1e-5 for error in errors.values())
        assert any(errors.values())
    assert silent.reconstructions == []


def test_metered_steps_change_nothing(data: Path, tmp_path: Path) -> None:
    states = [
        run(make_config(training={"reconstruction_meter": every}), data, tmp_path / str(every), MemoryLog(),
            build=_reversible_net)
        for every in (0, 1)
    ]  # fmt: skip
    assert differences(*[state.model.state_dict() for state in states]) == []


def test_the_error_of_a_block_is_that_of_its_own_input() -> None:
    chain = ReversibleSequential([ReversibleBlock(_Scale(0.0), _Scale(drift)) for drift in (0.0, 0.1)]).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    with reconstruction_errors(nn.ModuleDict({"stage": chain})) as errors:
        chain(x).sum().backward()
    x1, x2 = (half.detach() for half in x.chunk(2, 1))
    x1, x2 = x1 + x2, x1 + 2 * x2  # the input of the second block
    y1 = x1 + x2
    # Forward g added 1.1 y1, and in backward 1.2 y1 is taken away: x2 is off by 0.1 y1, and with it x1 = y1 - f(x2).
    off, true = torch.cat([0.1 * y1, -0.1 * y1], 1), torch.cat([x1, x2], 1)
    assert errors["stage/1"] == pytest.approx((off.norm() / true.norm()).item())
    assert chain.meter is None
