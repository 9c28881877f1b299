"""Every parameter is in exactly one group, with the rate and the decay that its settings give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo.config import Optimizer
from zoo.engine.optim import build_optimizer
from zoo.errors import ConfigError
from zoo.layers import ABN, InPlaceABN


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.bn = ABN(4)
        self.bn2 = InPlaceABN(4)
        self.layer_norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 2)


def _built(model: nn.Module, **settings: Any) -> dict[str, tuple[float, float]]:
    """Return rate and decay by parameter name; fails if a parameter is in two groups."""
    optimizer = build_optimizer(model, Optimizer.model_validate(settings))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        (names[id(parameter)], (group["lr"], group["weight_decay"]))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert len(dict(found)) == len(found)
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)
    return dict(found)


def test_by_default_all_parameters_share_rate_and_decay() -> None:
    model = _Net()
    names = [name for name, _ in model.named_parameters()]
    assert _built(model, learning_rate=0.2, weight_decay=1e-3) == dict.fromkeys(names, (0.2, 1e-3))


def test_the_classifier_has_its_own_rate_and_norms_no_decay_when_asked() -> None:
    groups = _built(_Net(), learning_rate=0.2, classifier_lr=0.01, weight_decay=1e-3, decay_norms=False)
    norms = ["bn.weight", "bn.bias", "bn2.weight", "bn2.bias", "layer_norm.weight", "layer_norm.bias"]
    assert groups == {
        "conv.weight": (0.2, 1e-3),
        **dict.fromkeys(norms, (0.2, 0.0)),
        "fc.weight": (0.01, 1e-3),
        "fc.bias": (0.01, 1e-3),
    }


def test_decay_of_convolution_and_classifier_matrices_alone_spares_norms_and_biases() -> None:
    groups = _built(_Net(), weight_decay=1e-3, decay_norms=False, decay_biases=False)
    assert {name for name, (_, decay) in groups.items() if decay} == {"conv.weight", "fc.weight"}


def test_norm_shifts_are_decayed_with_the_norms_and_not_as_biases() -> None:
    groups = _built(_Net(), weight_decay=1e-3, decay_biases=False)
    assert {name for name, (_, decay) in groups.items() if not decay} == {"fc.bias"}


def test_frozen_parameters_are_left_out_and_shared_ones_come_once() -> None:
    model = _Net()
    model.bn.requires_grad_(False)
    model.twin = model.fc  # type: ignore[assignment]
    groups = _built(model)
    assert not any(name.startswith("bn.") for name in groups)
    assert "fc.weight" in groups


def test_a_network_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter wants a gradient"):
        build_optimizer(_Net().requires_grad_(False), Optimizer())


def test_sgd_has_momentum_and_nesterov_and_adam_its_own_defaults() -> None:
    sgd = build_optimizer(_Net(), Optimizer(momentum=0.8, nesterov=True))
    adam = build_optimizer(_Net(), Optimizer(type="Adam", momentum=0.8, weight_decay=0.01))
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.8, True)
    assert isinstance(adam, torch.optim.Adam)
    assert adam.defaults["betas"] == (0.9, 0.999)
    assert adam.param_groups[0]["weight_decay"] == 0.01
