"""Reports and checks that are impossible: each error names the network, the input or the option."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.memory.block_checkpointing import checkpoint_blocks


class Keeping(nn.Linear):
    """A layer that stores its last output."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Undivided:
    """An object without copies."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


class Words(nn.Linear):
    """A layer without a tensor as an output."""

    def forward(self, x: Tensor) -> str:
        return "words"


class Reading(nn.Linear):
    """A layer whose forward pass depends on the values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 1)


class Constant(nn.Linear):
    """A layer that takes as much memory for a batch of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.zeros(2, 8, device=self.weight.device)).exp()


class Recurrent(nn.Sequential):
    """A recurrent layer between others."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x))[0])


class Named(nn.Linear):
    """A layer with the inputs of networks of transformers, one of them with the name of an option."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, budget: float = 1.0) -> Tensor:
        return super().forward(pixel_values).exp() * budget


def linear() -> nn.Linear:
    return nn.Linear(8, 2)


def x(size: int = 4) -> Tensor:
    return torch.randn(size, 8)


def keeping() -> nn.Module:
    model = nn.Sequential(Keeping(8, 2))
    model(x())
    return model


def with_attribute(value: object) -> nn.Module:
    model = linear()
    model.owner = value
    return model


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(linear()))


def of_optimizer(kind: Any, parameters: nn.Module | None = None, **options: Any) -> Callable[..., Any]:
    """Return a call of `zoo.memory_report` with an optimizer of a network, or of other parameters."""
    model = linear()
    optimizer = kind((parameters or model).parameters(), **options)
    return lambda: zoo.memory_report(model, x(), optimizer=optimizer)


def of_largest_batch(model: nn.Module, *batch: Tensor) -> Callable[[], object]:
    report = zoo.memory_report(model, *batch)
    assert report.fits("1GB")
    return lambda: report.largest_batch("1GB")


def of_largest_batch_with_autocast() -> Callable[[], object]:
    with torch.autocast("cpu", torch.bfloat16):
        return of_largest_batch(linear(), x())


def of_amount(memory: Any, ask: str) -> Callable[[], object]:
    report = zoo.memory_report(linear(), x())
    return lambda: getattr(report, ask)(memory)


def of_plot(name: str, *, trained: bool = True) -> Callable[[], object]:
    pytest.importorskip("matplotlib")
    return lambda: zoo.memory_report(linear().requires_grad_(trained), x()).plot(name)


def check(build: Callable[[], Any] = linear, **options: Any) -> Callable[[], Callable[[], object]]:
    return lambda: lambda: zoo.check(build(), x(), **options)


def check_loss(loss: Any) -> Callable[[], Callable[[], object]]:
    return check(loss=loss)


#: Networks that can neither be checked nor reported -> what the error must contain.
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "history": (keeping, ("0.last", "detach")),
    "history in a list": (lambda: with_attribute([torch.ones(1, requires_grad=True) * 2]), (" owner;", "detach")),
    "object without copies": (lambda: with_attribute(Undivided()), ("one of a kind", "copy.deepcopy")),
    "lock": (lambda: with_attribute(threading.Lock()), ("'_thread.lock'", "copy.deepcopy")),
    "old weight norm": (old_weight_norm, ("0.weight;", "torch.nn.utils.parametrizations")),
}


@pytest.mark.parametrize("use", [zoo.memory_report, zoo.check])
@pytest.mark.parametrize("network", NETWORKS)
def test_network_without_copies_raises(network: str, use: Callable[..., Any]) -> None:
    build, names = NETWORKS[network]
    model = build()
    refused(ConfigError, lambda: use(model, x()), *names)


#: Preparations that return a call -> the class of the call's error, and what it must contain.
REFUSALS: dict[str, tuple[Callable[[], Callable[[], object]], type[Exception], tuple[str, ...]]] = {
    "check on meta device": (check(lambda: nn.Linear(8, 2, device="meta")), ConfigError, ("meta device",)),
    "check of lazy network": (check(lambda: nn.LazyLinear(2)), ConfigError, ("lazy parameters",)),
    "check of a class": (check(lambda: nn.Linear), TypeError, ("model", "class Linear")),
    "check of a function": (check(lambda: torch.relu), TypeError, ("model", "builtin_function_or_method")),
    "check of frozen network": (
        check(lambda: linear().requires_grad_(False)), ConfigError, ("no parameter requires gradients",)
    ),
    "check of words": (check(lambda: Words(8, 2)), ConfigError, ("type str", "loss=")),
    "variant is a string": (check(variant="lean"), TypeError, ("variant", "str 'lean'")),
    "variant returns nothing": (check(variant=lambda _: None), TypeError, ("variant", "NoneType")),
    "variant without a parameter": (
        check(variant=lambda _: nn.Linear(8, 2, bias=False)), ConfigError, ("parameters", "1 instead of 2")
    ),
    "variant of another shape": (
        check(variant=lambda _: nn.Linear(8, 3)), ConfigError, ("shape (3,)", "bias of shape (2,)")
    ),
    "check without steps": (check(steps=0), ConfigError, ("steps=0",)),
    "loss of two arguments": (check_loss(nn.CrossEntropyLoss()), TypeError, ("CrossEntropyLoss", "'target'")),
    "loss function of two arguments": (check_loss(F.cross_entropy), TypeError, ("cross_entropy", "'target'")),
    "loss returns a number": (check_loss(lambda output: output.sum().item()), TypeError, ("float;", ".item()")),
    "loss of a batch": (check_loss(lambda output: output.sum(1)), ConfigError, ("torch.float32", "shape (4,)")),
    "complex loss": (check_loss(lambda output: output.cfloat().sum()), ConfigError, ("torch.complex64",)),
    "detached loss": (
        check_loss(lambda output: output.detach().sum()), ConfigError, ("loss does not require gradients",)
    ),
    "loss is a number": (check_loss(3), TypeError, ("loss", "int")),
    "check of an optimizer that cannot release": (
        check(optimizer=torch.optim.LBFGS, release_gradients=True), ConfigError, ("LBFGS",)
    ),
    "report with another optimizer": (lambda: of_optimizer(torch.optim.LBFGS), ConfigError, ("LBFGS",)),
    "report with optimizer of other parameters": (
        lambda: of_optimizer(torch.optim.SGD, linear(), lr=0.1), ConfigError, ("no parameter of the network",)
    ),
    "option that is an input": (
        lambda: lambda: zoo.memory_report(Named(8, 2), x(), budget=0.5), TypeError, ("budget", "Named.forward")
    ),
    "dict as the only input": (
        lambda: lambda: zoo.memory_report(Named(8, 2), {"pixel_values": x()}),
        TypeError,
        ("(pixel_values)", "Named", "(model, **batch)"),
    ),
    "input without copies": (
        lambda: lambda: zoo.memory_report(linear(), (each for each in range(3))),
        ConfigError,
        ("input", "copy.deepcopy"),
    ),
    "network on another device": (
        lambda: lambda: zoo.memory_report(linear().to("meta"), x()), ConfigError, ("network is on meta", "on cpu")
    ),
    "input on another device": (
        lambda: lambda: zoo.memory_report(linear(), x().to("meta")), ConfigError, ("network is on cpu", "on meta")
    ),
    **{
        f"{ask} of {memory!r}": (
            lambda memory=memory, ask=ask: of_amount(memory, ask), ConfigError, (repr(memory), '"24GB"')
        )
        for memory in ("24", 24, 0.5, "much", None, "50%")
        for ask in ("fits", "largest_batch")
    },
    "fit of an unmeasured step": (
        lambda: lambda: zoo.memory_report(linear(), x(), budget="1GB").fits("1GB", plain=True),
        ConfigError,
        ("no training step was measured", "budget"),
    ),
    **{
        f"largest batch of {kind.__name__}": (
            lambda kind=kind, options=options: of_largest_batch(
                Recurrent(linear(), kind(2, 4, **options), nn.ReLU()), torch.ones(4, 10, 8)
            ),
            ConfigError,
            (f"kernels of {kind.__name__}",),
        )
        for kind, options in {
            nn.LSTM: {"batch_first": True},
            nn.GRU: {"batch_first": True, "bidirectional": True},
            nn.RNN: {"num_layers": 2},
        }.items()
    },
    "largest batch that depends on data": (
        lambda: of_largest_batch(Reading(8, 8), x()), ConfigError, ("where Reading does not run",)
    ),
    "largest batch of constant memory": (
        lambda: of_largest_batch(Constant(8, 8), torch.ones(2, 0)), ConfigError, ("2 and 4 samples",)
    ),
    "largest batch without a batch": (
        lambda: of_largest_batch(Constant(8, 8), torch.tensor(1.0)), ConfigError, ("no batch dimension",)
    ),
    "largest batch with autocast": (of_largest_batch_with_autocast, ConfigError, ("autocast",)),
    **{
        f"plot as {name}": (lambda name=name: of_plot(name), ConfigError, names)
        for name, names in {
            "memory.xyz": ("'.xyz'", ".pdf"),
            "memory": ("memory", "suffix"),
            ".png": (".png", "suffix"),
            "a.": ("a.", "suffix"),
        }.items()
    },
    "plot of frozen network": (
        lambda: of_plot("memory.png", trained=False), ConfigError, ("no training step was measured",)
    ),
    "checkpoints without blocks": (
        lambda: lambda: checkpoint_blocks(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())),
        ConfigError,
        ("sequence of modules",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_impossible_report_or_check_raises(refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, error, names = REFUSALS[refusal]
    refused(error, prepare(), *names)
    assert not list(tmp_path.iterdir())


def test_plot_without_matplotlib_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = zoo.memory_report(linear(), x())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(ConfigError, lambda: report.plot(tmp_path / "memory.png"), "pip install matplotlib")
