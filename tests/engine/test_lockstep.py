"""Functions that take turns in threads and exchange tensors."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.refusals import refused
from zoo.engine._lockstep import Lockstep
from zoo.engine._process import Process
from zoo.errors import ConfigError
from zoo.torch_internals.data import ALL_GATHER


def test_functions_take_turns_and_gather_in_the_order_of_replicas() -> None:
    lockstep, found, order = Lockstep(3, Process()), {}, []

    def function(index: int) -> None:
        for turn in range(2):
            order.append((turn, index))
            found[turn, index] = lockstep.gather(torch.tensor([10.0 * turn + index]))

    lockstep.run([partial(function, index) for index in range(3)])
    assert order == [(turn, index) for turn in range(2) for index in (2, 1, 0)]
    for (turn, _), gathered in found.items():
        assert gathered.flatten().tolist() == [10 * turn, 10 * turn + 1, 10 * turn + 2]


def test_each_function_keeps_its_random_numbers() -> None:
    lockstep = Lockstep(3, Process())

    def draw(index: int, lockstep: Lockstep | None) -> list[float]:
        torch.manual_seed(index)
        random.seed(index)
        numbers = []
        for _ in range(3):
            numbers += [torch.rand(()).item(), random.random()]
            if lockstep is not None:
                lockstep.gather(torch.zeros(1))
        return numbers

    found: dict[int, list[float]] = {}
    lockstep.run([lambda index=index: found.update({index: draw(index, lockstep)}) for index in range(3)])
    assert found == {index: draw(index, None) for index in range(3)}


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 1])
def test_error_of_one_function_ends_all(failing: int, turn: int) -> None:
    lockstep, ended = Lockstep(3, Process()), []

    def function(index: int) -> None:
        try:
            for number in range(3):
                if (index, number) == (failing, turn):
                    raise OverflowError("too large")
                lockstep.gather(torch.zeros(1))
        finally:
            ended.append(index)

    with pytest.raises(OverflowError, match="too large"):
        lockstep.run([partial(function, index) for index in range(3)])
    lockstep.run([lambda: None] * 3)  # can run again
    assert len(ended) >= 1


@pytest.mark.parametrize("counts", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (0, 0, 1)])
def test_functions_that_gather_unequally_often_raise(counts: tuple[int, ...]) -> None:
    lockstep = Lockstep(3, Process())

    def function(count: int) -> None:
        for _ in range(count):
            lockstep.gather(torch.zeros(1))

    refused(ConfigError, lambda: lockstep.run([partial(function, count) for count in counts]), "optimizer.replicas = 3")


def test_different_norms_raise() -> None:
    lockstep = Lockstep(2, Process())
    refused(
        ConfigError,
        lambda: lockstep.run([lambda size=size: lockstep.gather(torch.zeros(size)) for size in (1, 2)]),
        "(1,), (2,)",
    )


def test_tensors_of_other_processes_come_in_the_order_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three processes, this one has the replicas 0 and 3, and the others have one each."""

    def gather(output: Tensor, own: Tensor) -> None:
        output.copy_(torch.cat([own, torch.tensor([[1.0], [-1.0], [2.0], [-1.0]])]))  # padded to two replicas

    monkeypatch.setattr(dist, ALL_GATHER, gather)
    lockstep, found = Lockstep(4, Process(0, 3)), []
    lockstep.run([lambda number=number: found.append(lockstep.gather(torch.tensor([number]))) for number in (0.0, 3.0)])
    assert [gathered.flatten().tolist() for gathered in found] == [[0.0, 1.0, 2.0, 3.0]] * 2
