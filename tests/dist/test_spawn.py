"""The helper of the distributed tests returns results by rank, and its errors name the rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.dist.spawn import run_distributed

pytestmark = pytest.mark.dist


def _sum_of_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("broken on purpose")
    dist.barrier()


def test_results_come_back_in_the_order_of_the_ranks() -> None:
    assert run_distributed(_sum_of_ranks, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_an_error_names_its_rank_and_does_not_hang_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1: [\s\S]*broken on purpose"):
        run_distributed(_fail_on_rank_one, 2)
