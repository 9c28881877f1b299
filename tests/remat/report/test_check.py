"""`zoo.check` finds known faults of other variants, says where, and changes nothing."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from zoo.errors import ConfigError


def blocks(*layers: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    parts = ([nn.Conv2d(8, 8, 3, padding=1), *(cls() for cls in layers)] for _ in range(3))
    return nn.Sequential(*(nn.Sequential(*each) for each in parts))


class Norm(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(8)


def images() -> Tensor:
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0))


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    for each in model.children():
        each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False, **options)
    return model


def test_lean_training_has_the_same_bits_and_holds_less(capsys: pytest.CaptureFixture[str]) -> None:
    found = zoo.check(blocks(Norm, nn.ReLU, nn.Dropout), images())
    assert found.same is True
    assert found.difference is None
    assert found.values > 2 * 20
    assert found.variant.held < 0.6 * found.plain.held
    assert found.time_ratio > 0
    assert capsys.readouterr().out == f"{found}\n"
    assert len(str(found).splitlines()) <= 10


def test_checkpointed_norms_count_twice() -> None:
    found = zoo.check(blocks(Norm, nn.ReLU), images(), variant=checkpointed)
    assert found.same is False
    assert (found.difference.step, found.difference.value) == (1, "buffer 0.1.running_mean")
    assert found.difference.place == "0.1 (Norm)"


def test_a_checkpoint_without_the_random_state_draws_other_masks_in_backward() -> None:
    variant = functools.partial(checkpointed, preserve_rng_state=False)
    found = zoo.check(blocks(nn.ReLU, nn.Dropout), images(), variant=variant)
    assert found.same is False
    assert found.difference.value == "gradient of 2.0.bias"
    assert found.difference.place == "2.2 (Dropout), in backward: MulBackward0"
    assert 0 < found.difference.differing <= found.difference.size == 8
    assert found.difference.largest > 0


@pytest.mark.slow
def test_a_budget_of_torch_compile_draws_other_masks() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        found = zoo.check(blocks(nn.ReLU, nn.Dropout), images(), variant=torch.compile)
    assert found.same is False


class Unused(nn.Module):
    """A network that draws a mask and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        F.dropout(x)
        return self.second(x)


@pytest.mark.slow
def test_a_graph_without_an_unused_dropout_leaves_other_random_numbers() -> None:
    found = zoo.check(Unused(), images(), variant=functools.partial(torch.compile, backend="aot_eager"))
    assert found.same is False
    assert found.difference.value == "state of the random numbers of the CPU"


class Exposing(Unused):
    """A network that returns an activation, too."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.second(F.gelu(x)), x


def test_a_write_through_data_is_seen_where_an_activation_is_recomputed() -> None:
    def loss(outputs: Any) -> Tensor:
        outputs[1].data.mul_(2)
        return outputs[0].square().mean()

    x = torch.randn(8, 8, 32, 32)
    found = zoo.check(Exposing(), x, loss=loss)
    assert found.same is False
    assert found.difference.value == "gradient of second.weight"
    assert found.difference.place == "second (Conv2d), in backward: ConvolutionBackward0"


class Noisy(nn.Linear):
    """A layer whose output is never the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + random.SystemRandom().random()


def test_a_nondeterministic_operation_is_not_the_fault_of_the_variant() -> None:
    found = zoo.check(nn.Sequential(nn.Linear(8, 8), Noisy(8, 8)), torch.randn(3, 8))
    assert found.same is None
    assert found.difference.place == "1 (Noisy), in forward: Add"
    assert "not deterministic" in str(found)
    assert len(str(found).splitlines()) <= 10


def test_the_network_and_the_generators_are_unchanged() -> None:
    model = blocks(Norm, nn.Dropout)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    x = images().requires_grad_()
    zoo.check(model, x, steps=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert x.grad is None
    assert all(each.grad is None for each in model.parameters())


def test_keywords_and_a_loss_of_the_network_itself() -> None:
    class WithLoss(nn.Linear):
        def forward(self, *, features: Tensor, labels: Tensor) -> Any:
            logits = super().forward(features)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    found = zoo.check(WithLoss(8, 4), features=torch.randn(3, 8), labels=torch.tensor([0, 1, 3]), steps=3)
    assert found.same is True
    assert found.fixed == ()
    # outputs with strides, loss, gradients of parameters and inputs, inputs, random numbers and mode; parameters
    assert found.values == 4 * (5 + 1 + 4 + 3 + 4) + (1 + 5) + 3 * 2 + (5 + 3 + 4)


def test_what_cannot_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter requires gradients"):
        zoo.check(nn.Linear(2, 2).requires_grad_(False), torch.randn(2, 2))
    with pytest.raises(ConfigError, match="other parameters or buffers than the network: 1 instead of 2"):
        zoo.check(nn.Linear(2, 2), torch.randn(2, 2), variant=lambda _: nn.Linear(2, 2, bias=False))
    with pytest.raises(ConfigError, match=r"bias of shape \(3,\) instead of bias of shape \(2,\)"):
        zoo.check(nn.Linear(2, 2), torch.randn(2, 2), variant=lambda _: nn.Linear(2, 3))


def test_a_variant_that_is_no_function_to_a_module_is_refused() -> None:
    model, x = nn.Linear(2, 2), torch.randn(2, 2)
    with pytest.raises(TypeError, match="variant is a function from a module to a module, not str 'lean'"):
        zoo.check(model, x, variant="lean")
    with pytest.raises(TypeError, match="variant has to return a module, and returned NoneType"):
        zoo.check(model, x, variant=lambda network: None)
