"""Every parameter is in one group with its rate and decay; the rate is a function of the position in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zoo
from zoo.config.optimizer import OPTIMIZER_PARAMS, Optimizer
from zoo.config.schedule import MIN_LINEAR_LR, Schedule
from zoo.engine._optim import build_optimizer, set_lr
from zoo.layers import ABN, InPlaceABN


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.bn = ABN(4)
        self.bn2 = InPlaceABN(4)
        self.layer_norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 2)


def built(model: nn.Module, **settings: Any) -> dict[str, tuple[float, float]]:
    """Return rate, to nine digits, and decay by parameter name; fails if a parameter is in two groups."""
    optimizer = build_optimizer(model, Optimizer.model_validate(settings))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        (names[id(parameter)], (float(f"{group['lr']:.9g}"), group["weight_decay"]))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert len(dict(found)) == len(found)
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)
    return dict(found)


def test_by_default_all_parameters_share_rate_and_decay() -> None:
    model = _Net()
    names = [name for name, _ in model.named_parameters()]
    assert built(model, learning_rate=0.2, weight_decay=1e-3) == dict.fromkeys(names, (0.2, 1e-3))


def test_classifier_can_have_its_own_rate_and_norms_no_decay() -> None:
    groups = built(_Net(), learning_rate=0.2, classifier_lr=0.01, weight_decay=1e-3, decay_norms=False)
    norms = ["bn.weight", "bn.bias", "bn2.weight", "bn2.bias", "layer_norm.weight", "layer_norm.bias"]
    assert groups == {
        "conv.weight": (0.2, 1e-3),
        **dict.fromkeys(norms, (0.2, 0.0)),
        "fc.weight": (0.01, 1e-3),
        "fc.bias": (0.01, 1e-3),
    }


class _WithHead(nn.Sequential):
    def __init__(self, name: str, head: nn.Module) -> None:
        super().__init__()
        self.add_module("body", nn.Linear(4, 4))
        self.add_module(name, head)


class _WithAnswer(_WithHead):
    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        return self.readout, self.body  # like distilled networks of timm


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return zoo.get(name, **options)


LINEAR = ("weight", "bias")
CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], str | tuple[str, ...]]] = {
    **{
        name: (partial(on_meta, name), classifier)
        for name, classifier in {
            "resnet18": "classifier.fc",
            "revcol_tiny": "cls.classifier.1",
            "revbifpn_s0": "head.fc",
            "revvit_s": "head.projection",
            "pyramid_revbifpn_s0": "cls",
            "deeplab_resnet18": "cls",
            "torchvision:resnet18": "fc",
            "torchvision:densenet121": "classifier",
            "torchvision:alexnet": "classifier.6",
            "torchvision:squeezenet1_1": "classifier.1",
            "torchvision:vit_b_32": "heads.head",
            "torchvision:swin_t": "head",
        }.items()
    },
    "module with head": (partial(_WithHead, "head", nn.Linear(4, 2)), "head"),
    "module with deep head": (
        partial(_WithHead, "head", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Dropout(0.1))),
        "head.2",
    ),
    "module with get_classifier": (partial(_WithAnswer, "readout", nn.Linear(4, 2)), ("readout", "body")),
}


@pytest.mark.parametrize(("build", "classifier"), CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_classifier_rate_reaches_classifier_of_every_network(
    build: Callable[[], nn.Module], classifier: str | tuple[str, ...]
) -> None:
    rates = {name: lr for name, (lr, _) in built(build(), learning_rate=0.2, classifier_lr=0.01).items()}
    names = (classifier,) if isinstance(classifier, str) else classifier
    assert {name for name, lr in rates.items() if lr == 0.01} == {f"{name}.{key}" for name in names for key in LINEAR}


def test_classifier_rate_reaches_classifier_of_timms_network() -> None:
    pytest.importorskip("timm")
    rates = built(on_meta("timm:convnext_atto"), classifier_lr=0.01)
    assert [name for name, (lr, _) in rates.items() if lr == 0.01] == ["head.fc.weight", "head.fc.bias"]


def test_decay_can_spare_norms_and_biases() -> None:
    groups = built(_Net(), weight_decay=1e-3, decay_norms=False, decay_biases=False)
    assert {name for name, (_, decay) in groups.items() if decay} == {"conv.weight", "fc.weight"}


def test_frozen_parameters_are_skipped_and_shared_ones_come_once() -> None:
    model = _Net()
    model.bn.requires_grad_(False)
    model.twin = model.fc  # type: ignore[assignment]
    groups = built(model)
    assert not any(name.startswith("bn.") for name in groups)
    assert "fc.weight" in groups


@pytest.mark.parametrize("name", OPTIMIZER_PARAMS)
def test_each_optimizer_takes_steps_of_torchs_class(name: str) -> None:
    settings = Optimizer(type=name, learning_rate=0.01, weight_decay=0.02, momentum=0.7)
    ours, theirs = _Net(), _Net()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, settings)
    momentum = {"momentum": 0.7} if name in ("SGD", "RMSprop") else {}
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, weight_decay=0.02, **momentum)
    for step in range(3):
        for net, each in ((ours, optimizer), (theirs, reference)):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number - 3) + step)
            each.step()
    for ours_after, theirs_after in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_after, theirs_after)


def test_model_method_no_weight_decay_is_respected() -> None:
    model = _Net()
    model.no_weight_decay = lambda: {"conv.weight"}  # type: ignore[assignment]  # like networks of timm
    assert [name for name, (_, decay) in built(model, weight_decay=0.1).items() if not decay] == ["conv.weight"]


EPOCHS, STEPS = 9, 7
BASE_LR = 0.1

TORCH = {
    "step": ({"step_size": 4, "gamma": 0.3}, lr_scheduler.StepLR),
    "multistep": ({"milestones": [2, 3, 7], "gamma": 0.5}, lr_scheduler.MultiStepLR),
    "constant": ({}, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)),
    "cosine": ({}, lr_scheduler.CosineAnnealingLR),
    "polynomial": ({"power": 0.9}, lr_scheduler.PolynomialLR),
}


def _schedule(**settings: Any) -> Schedule:
    return Schedule.model_validate({"epochs": EPOCHS, **settings})


def _ours(schedule: Schedule, steps_per_epoch: int = STEPS) -> list[float]:
    return [
        BASE_LR * schedule.factor(epoch, step, steps_per_epoch, BASE_LR)
        for epoch in range(schedule.epochs)
        for step in range(steps_per_epoch)
    ]


def _torchs(build: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], mode: str) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE_LR)
    scheduler = build(optimizer)
    rates = []
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            if mode == "step":
                scheduler.step()
        if mode == "epoch":
            scheduler.step()
    return rates


@pytest.mark.parametrize("mode", ["epoch", "step"])
@pytest.mark.parametrize("kind", TORCH)
def test_published_schedules_give_rates_of_torchs_schedulers(kind: str, mode: str) -> None:
    params, scheduler = TORCH[kind]
    ends = (EPOCHS * (STEPS if mode == "step" else 1),) if kind in ("cosine", "polynomial") else ()
    expected = _torchs(lambda optimizer: scheduler(optimizer, *ends, **params), mode)
    assert _ours(_schedule(type=kind, mode=mode, params=params)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_triangle_interpolates_between_zero_peak_and_zero() -> None:
    schedule = _schedule(type="triangle", mode="step", params={"peak_epoch": 2.5})
    after_step = np.arange(1, EPOCHS * STEPS + 1) / STEPS
    expected = np.interp(after_step, [0, 2.5, EPOCHS], [0, BASE_LR, 0])
    assert _ours(schedule) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert _ours(schedule)[-1] == 0


def test_linear_schedule_of_wider_resnet38_has_a_lower_limit() -> None:
    schedule = _schedule(type="linear", mode="step", epochs=90, params={"alpha": -2.222e-6, "beta": 1.0})
    steps = torch.tensor([*range(0, 449_000, 450), *range(449_000, 90 * 5005)], dtype=torch.float64)
    rates = torch.tensor(
        [BASE_LR * schedule.factor(*divmod(int(step), 5005), 5005, BASE_LR) for step in steps], dtype=torch.float64
    )
    published = BASE_LR * (1 - 2.222e-6 * steps)
    held = published < MIN_LINEAR_LR
    assert held.sum() == 409  # without the lower bound, the last 405 would be negative
    torch.testing.assert_close(rates[~held], published[~held], rtol=1e-12, atol=0)
    torch.testing.assert_close(rates[held], torch.full((409,), 1e-6, dtype=torch.float64), rtol=1e-12, atol=0)


def test_warm_up_rises_linearly_to_schedule() -> None:
    plain = _schedule(type="step", params={"step_size": 4})
    warm = _schedule(type="step", params={"step_size": 4}, warmup_epochs=1.5)
    ratios = [a / b for a, b in zip(_ours(warm), _ours(plain), strict=True)]
    warmup_steps = 1.5 * STEPS
    assert ratios == pytest.approx([min(1.0, (step + 1) / warmup_steps) for step in range(EPOCHS * STEPS)])
    assert ratios[10:] == [1.0] * (EPOCHS * STEPS - 10)


@pytest.mark.parametrize("mode", ["epoch", "step"])
def test_cosine_schedule_after_warmup_equals_timms(mode: str) -> None:
    timm = pytest.importorskip("timm.scheduler")
    unit = STEPS if mode == "step" else 1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE_LR)
    scheduler = timm.CosineLRScheduler(
        optimizer, t_initial=EPOCHS * unit, lr_min=0.0, warmup_t=2 * unit, warmup_lr_init=0.1 * BASE_LR,
    )  # fmt: skip
    times = [step if mode == "step" else step // STEPS for step in range(EPOCHS * STEPS)]
    expected = [scheduler._get_lr(t)[0] for t in times]
    ours = _ours(_schedule(type="cosine", mode=mode, warmup_epochs=2.0, warmup_start=0.1))
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_every_group_is_set_relative_to_its_own_initial_rate() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr, "initial_lr": lr} for lr in (0.1, 0.001)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for factor in (0.5, 0.25):  # twice: relative to the initial rate, not to the last one
        set_lr(optimizer, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.00025]
