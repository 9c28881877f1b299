"""Settings that contradict a network or each other: each error names the key, the value and the layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.dist.spawn import run_distributed
from tests.engine.test_replicas import Net, batches_of, replicas_config, sync, training_state
from tests.engine.tiny import MemoryLog, make_config, new_state, this_process
from tests.refusals import refused
from zoo.config.experiment import check_world_size
from zoo.config.optimizer import Optimizer
from zoo.engine._freezing import freeze
from zoo.engine._observers import GradientAngle, build_observers
from zoo.engine._optim import build_optimizer
from zoo.engine._process import Process
from zoo.engine._replicas import ExactReplicas, build_replicas
from zoo.engine._step import train_step
from zoo.errors import ConfigError
from zoo.layers import ABN, InPlaceABNSync, ReversibleBlock, ReversibleSequential
from zoo.registry.get import build_from_config

Call = Callable[[], object]


def _replicas(model: nn.Module, count: int = 4, **settings: Any) -> Call:
    return lambda: build_replicas(model, replicas_config(count, **settings), Process())


def _step(model: nn.Module, num_images: int = 16) -> Call:
    def call() -> None:
        state = training_state(model)
        train_step(state, *batches_of(state, num_images))

    return call


def _function_that_refers_to_network() -> nn.Module:
    model = Net(sync)
    head, model.head = model.head, nn.Identity()
    model.head.forward = lambda x: head(x)
    model.kept = head
    return model


def _hooked() -> nn.Module:
    model = Net(sync)
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


def _grouped() -> nn.Module:
    model = Net(sync)
    model.bn2.set_group("some of the processes")
    return model


class _Odd(Net):
    """A network that runs its second norm for some images only."""

    def forward(self, x: Tensor) -> Tensor:
        mapped = self.bn1(self.conv1(x))
        return self.head((self.bn2(mapped) if len(x) == 4 else mapped).mean((2, 3)))


def _meter_of_synchronized_replicas() -> None:
    config = replicas_config(
        network={"arch": "revnet38_cifar", "bn_mode": "sync"}, training={"gradient_angle_meter": 5}
    )
    loader: Any = SimpleNamespace(dataset=None)
    build_observers(new_state(config, build_from_config(config.network)), loader, None, MemoryLog())


def _optimizer(model: nn.Module, **settings: Any) -> Call:
    return lambda: build_optimizer(model, Optimizer.model_validate(settings))


def _headless() -> nn.Module:
    with torch.device("meta"):
        return zoo.get("resnet18", num_classes=0)


class _Parts(nn.Module):
    def __init__(self, head: str = "fc") -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(ABN(4), nn.Dropout())
        self.layer10 = nn.BatchNorm2d(4, affine=False)
        self.add_module(head, nn.Linear(4, 2))


def _frozen_classifier() -> nn.Module:
    model = _Parts()
    model.fc.requires_grad_(False)
    return model


def _train_without_validation(key: str, value: int) -> Call:
    items = [(torch.zeros(3, 32, 32), index % 2) for index in range(4)]
    return lambda: zoo.train(
        zoo.get("resnet32_cifar", num_classes=2), items, log_dir="log", verbose=False, settings={key: value}
    )


def _chain(store: bool) -> nn.Module:
    return ReversibleSequential([ReversibleBlock(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))], store=store)


NORMS = {"SyncBatchNorm": (nn.SyncBatchNorm(3), {}), "compiled": (InPlaceABNSync(3), {"training": {"compile": True}})}
RATE = "optimizer.classifier_lr = 0.01"
CLASSIFIERS = {
    "unknown name": _Parts("readout"),
    "sequential": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
    "no parameter": nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Identity()}),
    "no classifier": _headless(),
    "frozen": _frozen_classifier(),
}
MIXED = {"regularization": {"mixup": 0.8, "loss": "bce"}}
REFUSALS: dict[str, tuple[Call, tuple[str, ...]]] = {
    **{
        f"replicas: {name}": (
            _replicas(nn.Sequential(nn.Conv2d(3, 3, 1), norm), **settings),
            ("replicas = 4", "norm 1 ", "1 process", "4 processes"),
        )
        for name, (norm, settings) in NORMS.items()
    },
    "replicas: hook": (_replicas(_hooked()), ("replicas = 4", "head.weight")),
    "replicas: group": (_replicas(_grouped()), ("replicas = 4", "bn2")),
    "replicas: function": (_step(_function_that_refers_to_network()), ("replicas = 4", "kept.weight")),
    "replicas: norm that some skip": (_step(_Odd(sync), 13), ("replicas = 4",)),
    "replicas: meter": (_meter_of_synchronized_replicas, ("gradient_angle_meter = 5", "optimizer.replicas")),
    "meter: no chain": (
        lambda: GradientAngle(nn.Sequential(nn.Identity()), 5, MemoryLog()),
        ("training.gradient_angle_meter = 5",),
    ),
    "meter: chain that stores": (
        lambda: GradientAngle(nn.Sequential(_chain(store=True)), 5, MemoryLog()),
        ("training.gradient_angle_meter = 5",),
    ),
    "mix: odd batch per process": (lambda: check_world_size(make_config(**MIXED), 8), ("batch_size = 8", "(8)")),
    **{
        f"classifier rate: {name}": (_optimizer(model, classifier_lr=0.01), (RATE,))
        for name, model in CLASSIFIERS.items()
    },
    "layer decay: one layer": (
        _optimizer(nn.Linear(2, 2), layer_decay=0.5),
        ("optimizer.layer_decay = 0.5", "Linear"),
    ),
    **{
        f"freeze: {patterns}": (partial(freeze, _Parts(), patterns), names)
        for patterns, names in (
            (("layer2",), ("optimizer.freeze", "'layer2'", "_Parts", "layer1")),
            (("stem", "!fcc"), ("'!fcc'", " fc")),
            (("zzz",), ("'zzz'", "stem, layer1, layer10, fc")),
            (("*",), ("optimizer.freeze", "*:", '"!classifier"')),
        )
    },
    **{
        f"validation: {key}": (_train_without_validation(key, value), (f"{key} = {value}: ",))
        for key, value in (("optimizer.schedule.patience", 3), ("checkpoint.keep_best", 2))
    },
}


@pytest.mark.parametrize(("call", "names"), REFUSALS.values(), ids=REFUSALS)
def test_refusal_names_key_and_value(call: Call, names: tuple[str, ...], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused(ConfigError, call, *names)
    assert list(tmp_path.iterdir()) == []


def test_settings_beside_refused_ones_are_accepted() -> None:
    for norm, settings in NORMS.values():
        assert len(build_replicas(nn.Sequential(norm), replicas_config(1, **settings), Process()).own) == 1
    for model in CLASSIFIERS.values():
        _optimizer(model)()
    check_world_size(make_config(**MIXED), 4)
    GradientAngle(nn.Sequential(_chain(store=False)), 5, MemoryLog())


def test_missing_timm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    refused(ConfigError, _optimizer(_Parts(), type="timm:lamb"), "lamb", "timm")


def _refuse_on_ranks() -> None:
    refused(
        ConfigError, lambda: new_state(make_config(optimizer={"release_gradients": True, "clip": 0})), "2 processes"
    )
    model = nn.Linear(4, 4)
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    refused(ConfigError, lambda: zoo.release_gradients(wrapped, optimizer), "DistributedDataParallel")
    fully_shard(sharded := nn.Linear(4, 4))
    refused(ConfigError, lambda: ExactReplicas(sharded, replicas_config(), this_process()), "replicas = 4", "FSDP2")


@pytest.mark.dist
def test_refusals_of_several_processes() -> None:
    run_distributed(_refuse_on_ranks, 2)
