"""Frozen parts do not change, and everything else trains as if they were frozen by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, build_net, make_config, run
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.engine._freezing import freeze
from zoo.layers import ABN

STEM = ["0", "1"]  # convolution and norm of `build_net`


def _config(*patterns: str, **optimizer: Any) -> Experiment:
    return make_config(optimizer={"freeze": list(patterns), **optimizer})


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def _build_frozen_by_hand(network: NetworkSpec) -> nn.Module:
    model = build_net(network)
    for name in STEM:
        model.get_submodule(name).requires_grad_(False).eval()
    return model


def test_run_is_bit_identical_to_run_of_module_frozen_by_hand(data: Path, tmp_path: Path) -> None:
    frozen = run(_config(*STEM), data, tmp_path / "pattern", log := MemoryLog())
    by_hand = run(_config(), data, tmp_path / "hand", own := MemoryLog(), build=_build_frozen_by_hand)
    assert log.numbers == own.numbers
    assert _changed(_state(frozen.model), _state(by_hand.model)) == set()
    assert len(log.numbers) == 15
    assert frozen.eval_modules == ["1"]


def _states(config: Experiment, data: Path, folder: Path) -> list[dict[str, Tensor]]:
    """Train; return the state before, the state afterwards, and the state of the moving average."""
    before: list[dict[str, Tensor]] = []

    def build(network: NetworkSpec) -> nn.Module:
        model = build_net(network)
        before.append(_state(model))
        return model

    state = run(config, data, folder, MemoryLog(), build=build)
    assert state.ema is not None
    frozen = [name for name, parameter in state.model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["0.weight", "1.weight", "1.bias"]
    return [*before, _state(state.model), _state(state.ema)]


@pytest.mark.parametrize(("world_size", "replicas"), [(1, None), (1, 2), pytest.param(2, None, marks=pytest.mark.dist)])
def test_frozen_parts_keep_weights_and_statistics(
    world_size: int, replicas: int | None, data: Path, tmp_path: Path
) -> None:
    arguments = _config(*STEM, replicas=replicas), data, tmp_path
    for before, *after in [_states(*arguments)] if world_size == 1 else run_distributed(_states, 2, *arguments):
        trained = {name for name in before if name.startswith(("4.", "5.", "8."))}
        assert [_changed(before, state) for state in after] == [trained, trained]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(ABN(4), nn.Dropout())
        self.layer10 = nn.BatchNorm2d(4, affine=False)
        self.fc = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("patterns", "trained", "norms"),
    [
        ([], {"stem.0", "stem.1", "layer1.0", "fc"}, []),
        (["stem"], {"layer1.0", "fc"}, ["stem.1"]),
        (["stem.0"], {"stem.1", "layer1.0", "fc"}, []),
        (["layer1"], {"stem.0", "stem.1", "fc"}, ["layer1.0"]),
        (["layer1*"], {"stem.0", "stem.1", "fc"}, ["layer1.0", "layer10"]),
        (["layer10"], {"stem.0", "stem.1", "layer1.0", "fc"}, ["layer10"]),
        (["*", "!fc"], {"fc"}, ["stem.1", "layer1.0", "layer10"]),
        (["classifier"], {"stem.0", "stem.1", "layer1.0"}, []),
        (["*", "!stem", "stem.0"], {"stem.1"}, ["layer1.0", "layer10"]),
        (["stem.1.weight", "*.1.bias"], {"stem.0", "layer1.0", "fc"}, ["stem.1"]),
    ],
)
def test_patterns_select_parts(patterns: list[str], trained: set[str], norms: list[str]) -> None:
    model = _Net()
    assert freeze(model, patterns) == norms
    found = {name.rpartition(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert found == trained


@pytest.mark.parametrize(
    "name", ["resnet18", "torchvision:resnet18", "timm:vit_tiny_patch16_224", "revnet38_cifar", "densenet121"]
)
def test_classifier_alone_is_trained(name: str) -> None:
    with torch.device("meta"):
        model = zoo.get(name)
    freeze(model, ["*", "!classifier"])
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained == [name for name, _ in model.named_parameters()][-2:]
