"""RevBiFPN: long training on a grid, and the statistics of its norms; test_authors.py has the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests.nets import build, differing, images
from tests.step import step


@pytest.mark.slow
def test_thousand_steps_of_s0_are_bit_identical_to_stored_activations():
    results = []
    for memory in ("auto", "plain"):
        torch.manual_seed(0)
        model = zoo.get("revbifpn_s0", num_classes=10, memory=memory, grid_bits=14, drop_rate=0.25, drop_path_rate=0.1)
        results.append(train_on_small_images(model, 1000))
    assert not differing(*results)


def train_on_small_images(model: torch.nn.Module, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(10, (4,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


def test_norm_momentum_updates_statistics_like_two_updates_of_authors():
    once, twice = (build("revbifpn_s0", noise=0.1, norm_momentum=momentum) for momentum in (0.1, 0.19))
    for model in (once, twice):
        step(model, images())
    key = "rev_stack.1.rev_transform_0.f.xform_0_1.dw_conv.norm.running_mean"
    torch.testing.assert_close(twice.state_dict()[key], 1.9 * once.state_dict()[key])
