"""`zoo.check` finds faults in many ordinary training loops, and lists the loops that it compared."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import zoo
from tests.memory.faulty_tricks import (
    TRICKS,
    Classifier,
    FromPixels,
    Heads,
    LastCall,
    Losses,
    Packed,
    TanhInPlace,
    Trick,
    Words,
    annealed,
    features,
    frozen_stem,
    images,
    labeled,
    layers,
    normalized,
    replacing,
    tokens,
    with_last,
)
from zoo.memory.scenarios import SCENARIOS

#: Faults that a check does not find. It adds no hooks, makes no copies of the variant, and trains on values, sizes and
#: types of the given inputs.
NOT_FOUND = {
    "hooks added later",
    "copies that use the original",
    "tokens in a byte",
    "large tensors in half precision",
    "double precision",
}


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.memory.check.ROUNDS", 1)  # the time is not compared


def network_of(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def witnessed(trick: Trick, model: nn.Module) -> Sequence[Tensor]:
    torch.manual_seed(1)
    return trick.witness(model)


def are_same(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(values) == len(others) and all(map(torch.equal, values, others))


@pytest.mark.parametrize("name", TRICKS)
def test_trick_changes_ordinary_training(name: str) -> None:
    trick = TRICKS[name]
    model = network_of(trick.build)
    plain = witnessed(trick, copy.deepcopy(model))
    assert are_same(plain, witnessed(trick, copy.deepcopy(model)))
    assert not are_same(plain, witnessed(trick, trick.variant(copy.deepcopy(model))))


@pytest.mark.parametrize("name", TRICKS)
def test_fault_of_trick_is_found(name: str) -> None:
    trick = TRICKS[name]
    found = zoo.check(network_of(trick.build), *trick.inputs(), variant=trick.variant)
    assert found.same is (name in NOT_FOUND)
    assert len(str(found).splitlines()) <= 11


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (layers, features),
        (frozen_stem, features),
        (Heads, features),
        (Losses, features),
        (Classifier, labeled),
        (FromPixels, images),
        (Words, tokens),
        (normalized, features),
        (annealed, features),
    ],
)
def test_lean_is_bit_identical_in_each_scenario(build: Callable[[], nn.Module], inputs: Callable[[], Any]) -> None:
    found = zoo.check(network_of(build), *inputs())
    assert (found.same, found.difference, found.fixed) == (True, None, ())
    assert {*found.scenarios, *found.skipped, *(each.split(" (")[0] for each in found.errors)} == {
        each.name for each in SCENARIOS
    }
    assert {*found.skipped, *(each.split(" (")[0] for each in found.errors)} <= {
        "overwritten outputs",
        "overwritten inputs",
    }


class LastTwoCalls(LastCall):
    """Saves the tensors of two calls."""

    def forward(self, *args: Any) -> Any:
        self.call = getattr(self, "call", 0) + torch.is_grad_enabled()
        self.count = 1000 * (self.call % 2)
        return Packed.forward(self, *args)


class NewestFirst(Packed):
    """Saves a stack of calls. Backward reads the newest call; the first parameter's gradient removes it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls: deque[list[Tensor]] = deque()
        next(module.parameters()).register_post_accumulate_grad_hook(self.remove_newest)

    def remove_newest(self, _: Tensor) -> None:
        self.calls.pop()

    def forward(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            self.calls.append([])
        return super().forward(*args)

    def pack(self, tensor: Tensor) -> int:
        self.calls[-1].append(tensor.detach())
        return len(self.calls[-1]) - 1

    def unpack(self, kept: int) -> Tensor:
        return self.calls[-1][kept]


@pytest.mark.parametrize("variant", [LastTwoCalls, NewestFirst])
def test_fault_of_several_passes_is_found(variant: Callable[[nn.Module], nn.Module]) -> None:
    found = zoo.check(network_of(layers), *features(), variant=variant)
    assert found.same is False
    assert found.difference.scenario == "three passes before backward"
    assert str(found.difference).startswith("three passes before backward, gradient of ")


class TanhOnce(TanhInPlace):
    """Raises an error for second derivatives."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gradient, ctx.saved_tensors[0])


class TanhOnceInNetwork(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TanhOnce.apply(x)


def test_scenario_that_fails_in_plain_training_is_skipped() -> None:
    found = zoo.check(network_of(with_last(TanhOnceInNetwork())), *features())
    assert found.same is True
    assert "second derivatives" in found.skipped
    assert "autocast" in found.scenarios
    assert "\nnot compared, as plain training fails: second derivatives, " in str(found)


def test_error_of_variant_alone_is_no_difference_and_is_reported() -> None:
    found = zoo.check(network_of(layers), *features(), variant=replacing(nn.Tanh, TanhOnce))
    assert found.same is True
    assert found.skipped == ("overwritten inputs",)
    (error,) = found.errors
    assert error.startswith("second derivatives (RuntimeError: trying to differentiate twice")
    assert "\nthe variant alone raises an error: second derivatives (" in str(found)


def test_nondeterministic_scenario_is_skipped() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noise = random.SystemRandom().random() if torch.is_autocast_enabled("cpu") else 0
            return super().forward(x) * (1 + 9 * noise)

    found = zoo.check(network_of(with_last(Noisy(4, 4))), *features())
    assert found.same is True
    assert "autocast" in found.skipped
    assert "second derivatives" in found.scenarios


@pytest.mark.parametrize("scenario", ["three passes before backward", "autocast", "second derivatives"])
def test_fault_after_scenario_with_error_is_found(scenario: str) -> None:
    class Refusing(nn.Module):
        """Raises an error under autocast, and overwrites its output in a later scenario."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise NotImplementedError("autocast")
            return self.module(x)

    trick = {
        "three passes before backward": TRICKS["saved tensors of the last call alone"],
        "autocast": TRICKS["output in the memory of the caller"],
        "second derivatives": TRICKS["first derivatives alone"],
    }[scenario]
    found = zoo.check(network_of(trick.build), *trick.inputs(), variant=lambda model: Refusing(trick.variant(model)))
    assert found.same is False


class Stateful(nn.Module):
    """A network with state of several kinds in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.calls, self.sizes, self.last, self.seen = 0, [0], torch.zeros(4), {"rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.calls += 1
        self.sizes.append(len(x))
        self.last = y.detach()[-1]
        self.seen["rows"] += len(x)
        return y


def change_calls(model: Stateful) -> None:
    model.calls += 1


def change_sizes(model: Stateful) -> None:
    model.sizes.append(0)


def change_last(model: Stateful) -> None:
    model.last = model.last * 2


def change_seen(model: Stateful) -> None:
    model.seen["rows"] -= 1


def change_mode_of_part(model: Stateful) -> None:
    model.layer.training = False


class After(nn.Module):
    """A network with a fault after each pass."""

    def __init__(self, module: nn.Module, fault: Callable[[Any], None]) -> None:
        super().__init__()
        self.module, self.fault = module, fault

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x)
        self.fault(self.module)
        return output


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        (change_calls, "['calls']"),
        (change_sizes, "['sizes']"),
        (change_last, "['last']"),
        (change_seen, "['seen']['rows']"),
        (change_mode_of_part, ""),
    ],
)
def test_changed_attribute_is_found(fault: Callable[[Any], None], value: str) -> None:
    found = zoo.check(network_of(Stateful), *features(), variant=lambda model: After(model, fault))
    assert found.same is False
    assert found.difference.value == f"changed attributes{value}"


def replace_layer(model: nn.Module) -> nn.Module:
    class Own(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = layer.weight, layer.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    model.layer = Own(model.layer)
    return model


@pytest.mark.parametrize("variant", [lambda model: model, replace_layer, lambda model: After(model, lambda _: None)])
def test_attributes_of_right_variant_are_same(variant: Callable[[nn.Module], nn.Module]) -> None:
    assert zoo.check(network_of(Stateful), *features(), variant=variant).same is True


def test_attribute_that_only_the_building_changes_is_no_difference() -> None:
    class Settings(nn.Linear):
        checkpoints = False

        def __init__(self) -> None:
            super().__init__(8, 4)
            self.checkpoints = False

    def variant(model: nn.Module) -> nn.Module:
        model.checkpoints = True
        return model

    assert zoo.check(network_of(Settings), *features(), variant=variant).same is True


class OwnDropout(nn.Module):
    """A custom dropout, whose rate a check does not change."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training)


def test_dropout_of_other_class_is_bit_identical() -> None:
    def variant(model: nn.Sequential) -> nn.Module:
        return nn.Sequential(*(OwnDropout(each.p) if isinstance(each, nn.Dropout) else each for each in model))

    assert zoo.check(network_of(layers), *features(), variant=variant).same is True


def test_parts_preserve_mode_and_settings() -> None:
    model = network_of(layers)
    model[1].eval()
    model[3].requires_grad_(False)
    found = zoo.check(model, *features())
    assert (found.same, found.fixed) == (True, ())
    assert [each.training for each in model] == [index != 1 for index in range(len(model))]
    assert [each.requires_grad for each in model.parameters()] == [True] * 4 + [False] * 2 + [True] * 2
    assert model[5].p == 0.25


def test_place_of_difference_in_scenario_is_named() -> None:
    trick = TRICKS["mode of backward"]
    found = zoo.check(network_of(trick.build), *trick.inputs(), variant=trick.variant)
    assert found.difference.place == "6 (Linear), in backward: AddmmBackward0"
