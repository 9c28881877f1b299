"""A run of the original trainer, written here with plain torch, continues with the losses of uninterrupted training."""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.tiny import MemoryLog, make_config, make_images, run
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.engine._process import Process
from zoo.errors import CheckpointError, WeightsError
from zoo.layers import ABN, InPlaceABN
from zoo.tasks import task_of

EPOCHS, DONE = 3, 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=24)


def build(network: NetworkSpec) -> nn.Module:
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 8, 3, bias=False),
        bn1=InPlaceABN(8),
        conv2=nn.Conv2d(8, 8, 3),
        bn2=ABN(8, activation="elu", activation_param=1.0),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        classifier=nn.Sequential(OrderedDict(fc=nn.Linear(8, network.num_classes))),
    )
    return nn.Sequential(layers)


def settings(**optimizer: Any) -> Experiment:
    schedule = {"type": "constant", "mode": "epoch", "epochs": EPOCHS, "params": {}}
    return make_config(optimizer={"ema_decay": None, "clip": 1.0, "schedule": schedule, **optimizer})


class PlainRun(NamedTuple):
    """Losses of all steps, the content of the file after the first epoch, and the network at the end."""

    losses: list[float]
    saved: dict[str, Any]
    model: nn.Module


def train_plainly(config: Experiment, data: Path) -> PlainRun:
    """Train as the original does, with torch's optimizer and schedules, on our batches."""
    losses, saved, model = _trained_plainly(config.model_dump_json(), data)
    return PlainRun(losses, copy.deepcopy(saved), model)


@functools.cache
def _trained_plainly(content: str, data: Path) -> PlainRun:
    config = Experiment.model_validate_json(content)
    wanted = config.optimizer
    task = task_of(config)
    loader = task.build_train_loader(data, Process().loader_options(0, None))
    torch.manual_seed(0)
    model = build(config.network)
    params: Any = model.parameters()
    if wanted.classifier_lr != -1:
        named = list(model.named_parameters())
        params = [
            {"params": [parameter for name, parameter in named if "fc" not in name]},
            {"params": [parameter for name, parameter in named if "fc" in name], "lr": wanted.classifier_lr},
        ]
    common: dict[str, Any] = {"lr": wanted.learning_rate, "weight_decay": wanted.weight_decay}
    if wanted.type == "SGD":
        common |= {"momentum": wanted.momentum, "nesterov": wanted.nesterov}
    optimizer: Any = getattr(torch.optim, wanted.type)(params, **common)
    kind, of_schedule = wanted.schedule.type, wanted.schedule.params.model_dump()
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    if kind == "step":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, int(of_schedule["step_size"]), of_schedule["gamma"])
    if kind == "linear":
        alpha, beta = of_schedule["alpha"], of_schedule["beta"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: alpha * t + beta)
    losses, saved = [], {}
    for epoch in range(EPOCHS):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            loss = F.cross_entropy(model(batch.on(torch.device("cpu"))), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            if wanted.clip:
                nn.utils.clip_grad_norm_(model.parameters(), wanted.clip)
            optimizer.step()
            losses.append(loss.item())
            if wanted.schedule.mode == "step":
                scheduler.step()
        if wanted.schedule.mode == "epoch":
            scheduler.step()
        if epoch + 1 == DONE:
            saved = {
                "epoch": epoch + 1,
                "arch": config.network.arch,
                "state_dict": {f"module.{key}": value for key, value in model.state_dict().items()},
                "best_prec1": 62.5,
                "optimizer": optimizer.state_dict(),
            }
            saved = copy.deepcopy(saved)
    return PlainRun(losses, saved, model)


def without_counters(saved: dict[str, Any]) -> None:
    """Convert to the format of releases before 1.1."""
    for key in [key for key in saved["state_dict"] if key.endswith("num_batches_tracked")]:
        del saved["state_dict"][key]


def with_addresses(saved: dict[str, Any]) -> None:
    """Convert to the format of PyTorch before 1.5, which names parameters by their addresses."""
    optimizer = saved["optimizer"]
    for group in optimizer["param_groups"]:
        group["params"] = [10**14 - 64 * index for index in group["params"]]
    optimizer["state"] = {10**14 - 64 * index: value for index, value in reversed(optimizer["state"].items())}


def without_arch(saved: dict[str, Any]) -> None:
    del saved["arch"]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        ({"momentum": 0.9, "learning_rate": 0.1}, without_counters),
        (
            {
                "nesterov": True,
                "classifier_lr": 0.02,
                "schedule": {
                    "type": "step",
                    "mode": "epoch",
                    "epochs": EPOCHS,
                    "params": {"step_size": 1, "gamma": 0.3},
                },
            },
            with_addresses,
        ),
        (
            {
                "clip": 0.0,
                "schedule": {"type": "linear", "mode": "step", "epochs": EPOCHS, "params": {"alpha": -0.1, "beta": 1}},
            },
            without_arch,
        ),
        ({"type": "Adam", "learning_rate": 0.01, "momentum": 0.0}, without_counters),
    ],
    ids=["constant", "classifier", "linear", "adam"],
)
def test_run_of_original_trainer_continues(
    data: Path,
    tmp_path: Path,
    optimizer: dict[str, Any],
    change: Callable[[dict[str, Any]], None],
    zipped: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = settings(**optimizer)
    plain = train_plainly(config, data)
    change(plain.saved)
    torch.save(plain.saved, tmp_path / "theirs.pth.tar", _use_new_zipfile_serialization=zipped)
    log = MemoryLog()
    caplog.set_level(logging.INFO)
    state = run(config, data, tmp_path / "log", log, build=build, resume=str(tmp_path / "theirs.pth.tar"))
    steps = len(plain.losses) // EPOCHS
    assert [metrics.loss for metrics in log.metrics] == pytest.approx(plain.losses[DONE * steps :], rel=1e-4)
    for ours, theirs in zip(state.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [epoch for epoch, *_ in log.validations] == [1, 2]
    assert state.best_score >= 62.5
    assert any("1 of 3 epochs are done, best score 62.50 %" in line for line in caplog.messages)
    assert any("no random state" in line for line in caplog.messages)
    assert read(tmp_path / "log" / CHECKPOINT)["epoch"] == EPOCHS


def test_losses_differ_without_state_of_optimizer(data: Path, tmp_path: Path) -> None:
    """Shows that the test above is sensitive to the state of the optimizer."""
    config = settings()
    plain = train_plainly(config, data)
    plain.saved["optimizer"]["state"] = {}
    torch.save(plain.saved, tmp_path / "theirs.pth.tar")
    log = MemoryLog()
    run(config, data, tmp_path / "log", log, build=build, resume=str(tmp_path / "theirs.pth.tar"))
    losses = plain.losses[-len(log.metrics) :]
    assert [metrics.loss for metrics in log.metrics] != pytest.approx(losses, rel=1e-3)


def test_moving_average_starts_from_weights_of_file(data: Path, tmp_path: Path) -> None:
    plain = train_plainly(settings(), data)
    plain.saved["epoch"] = EPOCHS
    torch.save(plain.saved, tmp_path / "theirs.pth.tar")
    config = settings(ema_decay=0.9)
    state = run(config, data, tmp_path / "log", MemoryLog(), build=build, resume=str(tmp_path / "theirs.pth.tar"))
    assert state.ema is not None
    weights = plain.saved["state_dict"]
    for name, value in state.ema.state_dict().items():
        assert torch.equal(value, weights[f"module.{name}"])


def test_auto_resumes_in_log_folder_of_original(data: Path, tmp_path: Path) -> None:
    plain = train_plainly(settings(), data)
    torch.save(plain.saved, tmp_path / CHECKPOINT)
    log = MemoryLog()
    run(settings(), data, tmp_path, log, build=build, resume="auto")
    assert log.metrics[0].epoch == DONE


SGD = ("optimizer", "param_groups", 0)
WEIGHT, BIAS = "module.classifier.fc.weight", "module.classifier.fc.bias"
CHANGES: list[tuple[dict[tuple[Any, ...], Any], str]] = [
    ({("arch",): "resnet50"}, "resnet50, this run trains resnet18"),
    ({("epoch",): -1}, "epoch = -1"),
    ({("epoch",): "1"}, "epoch = '1'"),
    ({("best_prec1",): "much"}, "much"),
    ({("state_dict",): {"module.conv1.weight": torch.zeros(8, 3, 3, 3)}}, "missing in the file"),
    ({("state_dict", WEIGHT): torch.zeros(3, 3)}, "fc.weight"),
    (
        {
            ("state_dict", f"module.classifier.fc.{key}"): torch.zeros(5, *shape)
            for key, *shape in (("weight", 8), ("bias",))
        },
        "number of classes",
    ),
    ({("optimizer", "param_groups"): []}, "network of 9"),
    ({(*SGD, "params"): [0, 1]}, "groups of 2 parameters, the network of 9"),
    ({(*SGD, "momentum"): 0.5}, "momentum: 0.5 before and 0.9 now"),
    ({(*SGD, "nesterov"): True}, "nesterov: True before and False now"),
    ({(*SGD, "initial_lr"): 0.7}, "initial_lr: 0.7 before and 0.05 now"),
    ({(*SGD, "betas"): (0.9, 0.99)}, "betas: (0.9, 0.99) before and absent now"),
    ({("optimizer", "state"): 3}, "TypeError"),
    ({("optimizer", "state"): {0: {"momentum_buffer": torch.zeros(2)}}}, "momentum_buffer of conv1.weight"),
]


@pytest.mark.parametrize(("changes", "name"), CHANGES, ids=[name for _, name in CHANGES])
def test_mismatched_file_of_original_raises(
    data: Path, tmp_path: Path, changes: dict[tuple[Any, ...], Any], name: str
) -> None:
    saved: Any = train_plainly(settings(), data).saved
    for (*parents, key), value in changes.items():
        functools.reduce(operator.getitem, parents, saved)[key] = value
    path = tmp_path / "theirs.pth.tar"
    torch.save(saved, path)
    resume = partial(run, settings(), data, tmp_path / "log", MemoryLog(), build=build, resume=str(path))
    refused((CheckpointError, WeightsError), resume, path.name, name)
