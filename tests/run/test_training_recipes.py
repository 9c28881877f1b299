"""Published recipes have the settings of their sources, and a step equals a step of timm's or torchvision's code."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import v2

from tests.engine.tiny import MemoryLog, differences, make_images, run
from zoo.config.describe import leaves
from zoo.config.experiment import Experiment
from zoo.config.network import ExternalSpec, Spec
from zoo.config.parse import experiment_names, load_experiment, parse_experiment
from zoo.data.seeding import random_of
from zoo.data.transforms.mixing import draw_mix
from zoo.engine import _trainer as trainer
from zoo.engine._state import TrainState
from zoo.engine._step import StepBatch
from zoo.registry.get import build_from_config

NAMES = [name for name in experiment_names() if name.startswith("imagenet_")]
TABLE = Path(__file__).parents[1] / "golden" / "training_recipes.csv"
BATCH, SIDE, NUM_CLASSES = 8, 32, 10


def _stated() -> dict[str, dict[str, Any]]:
    """Return the settings of each recipe as its sources state them; an empty cell says nothing."""
    stated: dict[str, dict[str, Any]] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            setting, _ = row.pop("setting"), row.pop("note")
            for name, text in row.items():
                is_word = text[:1].isalpha() and text not in ("true", "false")
                stated.setdefault(name, {}).update({setting: text if is_word else json.loads(text)} if text else {})
    return stated


STATED = _stated()
FIXED = {
    "warmup_epochs": 0,
    "warmup_start": None,
    "decay_after_warmup": False,
}  # a schedule that starts at the full rate
# A small network of the same family that replaces the network of a recipe: its architecture and options.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "torchvision:resnet50": ("torchvision:shufflenet_v2_x0_5", {}),
    "torchvision:mobilenet_v3_large": ("torchvision:mobilenet_v3_large", {"width_mult": 0.25}),
    "timm:resnet50": ("timm:test_resnet", {}),
    "timm:convnext_tiny": ("timm:test_convnext", {}),
    "timm:deit_small_patch16_224": ("timm:test_vit", {"img_size": SIDE}),
    "timm:efficientnet_b0": ("timm:test_efficientnet", {}),
    **dict.fromkeys(("revcol_tiny", "revcol_small", "revcol_base"), ("revcol_tiny", {})),
    "timm:swin_tiny_patch4_window7_224": (
        "timm:swin_tiny_patch4_window7_224",
        {"depths": [1, 1, 2, 1], "embed_dim": 24, "img_size": SIDE, "window_size": 4},
    ),
}
FIXED_SIZE = {"deit": {"img_size": SIDE}, "swin": {"img_size": SIDE, "window_size": 4}}  # options for other image sizes


def tiny(name: str, *, warmup: bool = True, small: bool = True) -> Experiment:
    """Return a recipe for small images and batches, with a small network by default, without mixed precision."""
    settings = load_experiment(name).model_dump(mode="json", exclude={"expected"})
    network = settings["network"]
    if not network["arch"].startswith("torchvision:"):
        pytest.importorskip("timm")
    fitting = next((options for word, options in FIXED_SIZE.items() if word in name), {})
    arch, options = SMALL[network["arch"]] if small else (network["arch"], fitting)
    network |= {"arch": arch, "num_classes": NUM_CLASSES, "options": {**network["options"], **options}}
    settings["optimizer"]["batch_size"] = BATCH
    settings["input"] |= {"crop_train": SIDE, "scale_val": SIDE, "crop_val": SIDE}
    settings["training"]["amp"] = "off"
    if not warmup:
        settings["optimizer"]["schedule"] |= FIXED
    return parse_experiment(settings, name)


def test_recipe_sets_exactly_settings_of_its_sources() -> None:
    assert sorted(STATED) == sorted(NAMES)
    for name, stated in STATED.items():
        experiment = load_experiment(name)
        settings = dict(leaves(experiment.model_dump(mode="json", exclude={"expected"})))
        defaults = dict(leaves(experiment.defaults().model_dump(mode="json")))
        for key, value in stated.items():
            assert settings[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), (name, key)
        own = {key for key, value in settings.items() if "params" not in key and value != defaults.get(key)}
        assert own <= stated.keys() | {"network.num_classes"}, name


class Step(NamedTuple):
    """A step: its images and targets, unmixed and mixed, the state of the generator before it, and its results.

    The loss is the mean over the images; gradients are clipped.
    """

    unmixed: tuple[Tensor, Tensor]
    batch: StepBatch
    generator: Tensor
    before: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    average: dict[str, Tensor] | None


class _Enough(Exception):
    """Two steps are done."""


def take_two_steps(config: Experiment, data: Path, log_dir: Path, dtype: torch.dtype = torch.float32) -> list[Step]:
    """Train for two steps with weights and images of ``dtype``, and return them."""
    steps: list[Step] = []
    unmixed: list[tuple[Tensor, Tensor]] = []
    take, mix = trainer.train_step, trainer.Trainer._mixed

    def mixed(run: Any, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        unmixed.append((images.to(dtype), targets))
        return mix(run, images.to(dtype), targets)

    def watched(state: TrainState, batch: StepBatch) -> None:
        generator, before = torch.get_rng_state(), deepcopy(state.model.state_dict())
        state.meter.reset()
        take(state, batch)
        loss, average = state.meter.read().loss, None if state.ema is None else deepcopy(state.ema.state_dict())
        gradients = {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}
        weights = deepcopy(state.model.state_dict())
        steps.append(Step(unmixed[-1], batch, generator, before, loss, gradients, weights, average))
        if len(steps) == 2:
            raise _Enough

    def build(network: Spec) -> nn.Module:
        return build_from_config(network).to(dtype)

    with (
        mock.patch.object(trainer.Trainer, "_mixed", mixed),
        mock.patch.object(trainer, "train_step", watched),
        pytest.raises(_Enough),
    ):
        run(config, data, log_dir, MemoryLog(), build=build)
    return steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=2 * BATCH, num_val=2)


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_recipe_are_bit_identical_if_it_is_lean(
    name: str, small: bool, data: Path, tmp_path: Path
) -> None:
    config = tiny(name, small=small)
    memory = config.network.memory if isinstance(config.network, ExternalSpec) else "plain"
    stored, lean = (
        config.model_copy(update={"network": config.network.changed(memory=each)}) for each in (memory, "lean")
    )
    plain = take_two_steps(stored, data, tmp_path / "plain")
    for step in plain:
        assert step.batch.images.shape == (BATCH, 3, SIDE, SIDE)
        assert step.batch.targets.dim() == 1 + config.regularization.mixes
        assert all(tensor.isfinite().all() for tensor in step.weights.values())
    assert differences(plain[0].weights, plain[1].weights)
    (_, second) = take_two_steps(lean, data, tmp_path / "lean")
    assert differences(second.weights, plain[1].weights) == []


def _timm() -> Any:
    """Return timm with the modules that training needs."""
    timm = pytest.importorskip("timm")
    for module in ("data", "loss", "optim", "utils"):
        import_module(f"timm.{module}")
    return timm


class Reference(NamedTuple):
    """What another package builds for a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    targets: Tensor
    loss: nn.Module


def timm_reference(name: str, config: Experiment, step: Step) -> Reference:
    """Return the objects that timm's train.py builds from a recipe, for the images and random numbers of ``step``."""
    timm = _timm()
    import_module("zoo.registry.timm_models")
    stated, arch = STATED[name], config.network.arch
    registered = arch.removeprefix("timm:") if isinstance(config.network, ExternalSpec) else f"zoo_{arch}"
    model = timm.create_model(registered, num_classes=NUM_CLASSES, **config.network.options).double()
    optimizer = timm.optim.create_optimizer_v2(
        model,
        opt=stated["optimizer.type"].removeprefix("timm:").lower(),
        lr=stated["optimizer.learning_rate"],
        weight_decay=stated["optimizer.weight_decay"],
        momentum=0.9,
        **({"eps": stated["optimizer.params.eps"]} if "optimizer.params.eps" in stated else {}),
    )
    (images, targets), smoothing = step.unmixed, stated["optimizer.label_smoothing"]
    if "regularization.mixup" not in stated:
        return Reference(model, optimizer, images, targets, timm.loss.LabelSmoothingCrossEntropy(smoothing))
    loss = timm.loss.SoftTargetCrossEntropy()
    if stated.get("regularization.loss") == "bce":
        threshold = stated["regularization.bce_target_threshold"]
        loss = timm.loss.BinaryCrossEntropy(target_threshold=threshold, smoothing=smoothing)
    mixup, cutmix = stated["regularization.mixup"], stated["regularization.cutmix"]
    draws = random_of(config.seed, 0, 0, trainer.MIXES)
    with (
        mock.patch.object(np.random, "rand", draws.random),
        mock.patch.object(np.random, "beta", draws.betavariate),
        mock.patch.object(np.random, "randint", lambda low, high, size: draws.randrange(low, high)),
    ):
        mix = timm.data.Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=NUM_CLASSES)
        # timm mixes the first with the last image: in this order those are the pairs of two halves.
        half = BATCH // 2
        order = torch.cat([torch.arange(half), torch.arange(BATCH - 1, half - 1, -1)])
        mixed, shares = mix(images[order], targets[order])
    return Reference(model, optimizer, mixed[order.argsort()], shares[order.argsort()].double(), loss)


def torchvision_reference(name: str, config: Experiment, step: Step) -> Reference:
    """Return the objects that torchvision's train.py builds from a recipe, for the images and numbers of ``step``."""
    stated = STATED[name]
    arch, options = config.network.arch.removeprefix("torchvision:"), config.network.options
    model = models.get_model(arch, num_classes=NUM_CLASSES, **options).double()
    lr, decay = stated["optimizer.learning_rate"], stated["optimizer.weight_decay"]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    of_norms = [parameter for norm in norms for parameter in norm.parameters()]
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in of_norms)]
    groups = [
        {"params": others, "weight_decay": decay},
        {"params": of_norms, "weight_decay": decay if stated.get("optimizer.decay_norms", True) else 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr, momentum=0.9)
    if stated["optimizer.type"] == "RMSprop":
        optimizer = torch.optim.RMSprop(groups, lr, momentum=0.9, alpha=0.9, eps=0.0316)
    loss = nn.CrossEntropyLoss(label_smoothing=stated["optimizer.label_smoothing"])
    images, targets = step.unmixed
    if "regularization.mixup" not in stated:
        return Reference(model, optimizer, images, targets, loss)
    mix = draw_mix(config.regularization, SIDE, SIDE, random_of(config.seed, 0, 0, trainer.MIXES))
    assert mix is not None
    kind, params = v2.MixUp, {"lam": mix.weight}
    if mix.box is not None:
        top, left, height, width = mix.box
        kind, params = v2.CutMix, {"box": (left, top, left + width, top + height), "lam_adjusted": mix.weight}
    mixed, shares = torch.empty_like(images), torch.empty(BATCH, NUM_CLASSES)
    for first in range(BATCH // 2):  # each image is mixed with its neighbor
        pair = [first, first + BATCH // 2]
        with mock.patch.object(kind, "make_params", return_value=params):
            mixed[pair], shares[pair] = kind(num_classes=NUM_CLASSES)(images[pair], targets[pair])
    return Reference(model, optimizer, mixed, shares.double(), loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_step_equals_step_of_the_other_package(name: str, data: Path, tmp_path: Path) -> None:
    """In float64, where rounding is far below what Adam amplifies; the schedule starts at the full rate."""
    config = tiny(name, warmup=False)
    step, second = take_two_steps(config, data, tmp_path, torch.float64)
    of_timm = not config.network.arch.startswith("torchvision:")
    reference = (timm_reference if of_timm else torchvision_reference)(name, config, step)
    torch.testing.assert_close(step.batch.images, reference.images)
    reference.model.load_state_dict(step.before)
    reference.model.train()
    torch.set_rng_state(step.generator)
    loss = reference.loss(reference.model(reference.images), reference.targets)
    loss.backward()
    if clip := STATED[name]["optimizer.clip"]:
        nn.utils.clip_grad_norm_(reference.model.parameters(), clip)
    reference.optimizer.step()
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    for key, parameter in reference.model.named_parameters():
        torch.testing.assert_close(step.gradients[key], parameter.grad, rtol=1e-5, atol=1e-7)
    updated = reference.model.state_dict()
    assert differences(step.before, step.weights)
    # Targets are mixed in float32, and Adam amplifies rounding of the smallest gradients. RevCol has more of them: its
    # branches begin with a factor of 1e-6.
    amplified = 2e-3 if "revcol" in name else 1e-3
    rounding = STATED[name]["optimizer.learning_rate"] * (amplified if config.optimizer.type == "AdamW" else 1e-6)
    for key, weight in step.weights.items():
        torch.testing.assert_close(weight, updated[key], rtol=1e-6, atol=rounding)
    if second.average is not None:
        _check_average(name, of_timm, step, second)


def _check_average(name: str, of_timm: bool, first: Step, second: Step) -> None:
    """Compare the moving average after the second step with the average of the other package."""
    assert first.average is not None
    assert second.average is not None
    expected = first.weights  # torchvision updates the average in each 32nd step
    if of_timm:
        timm = _timm()
        network = nn.ParameterList(first.weights[key] for key in first.gradients)
        ema = timm.utils.ModelEmaV3(network, decay=STATED[name]["optimizer.ema_decay"])
        ema.update(nn.ParameterList(second.weights[key] for key in first.gradients))
        expected = dict(zip(first.gradients, ema.module, strict=True))
    for key in first.gradients:
        assert torch.equal(first.average[key], first.weights[key])
        torch.testing.assert_close(second.average[key], expected[key])


STEPS_PER_EPOCH = 4


def reference_rates(name: str) -> list[float]:
    """Return the learning rate of each step, by the scheduler that the source uses, with the values that it states."""
    stated = {key.removeprefix("optimizer.schedule."): value for key, value in STATED[name].items()}
    lr, epochs = stated["optimizer.learning_rate"], stated["epochs"]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr)
    if "torchvision" in stated["network.arch"]:
        of_torch = torch.optim.lr_scheduler
        if stated["type"] == "step":
            scheduler: Any = of_torch.StepLR(optimizer, stated["params.step_size"], stated["params.gamma"])
        else:
            warmup = stated["warmup_epochs"]
            scheduler = of_torch.SequentialLR(
                optimizer,
                [
                    of_torch.LinearLR(optimizer, start_factor=stated["warmup_start"], total_iters=warmup),
                    of_torch.CosineAnnealingLR(optimizer, T_max=epochs - warmup, eta_min=0.0),
                ],
                milestones=[warmup],
            )
        rates = []
        for _ in range(epochs):
            rates += [optimizer.param_groups[0]["lr"]] * STEPS_PER_EPOCH
            optimizer.step()
            scheduler.step()
        return rates
    factory = pytest.importorskip("timm.scheduler")
    prefix, per_step = stated["decay_after_warmup"], stated["mode"] == "step"
    scheduler, _ = factory.create_scheduler_v2(
        optimizer,
        sched=stated["type"],
        num_epochs=epochs - prefix * stated["warmup_epochs"],
        decay_epochs=stated.get("params.step_size"),
        decay_rate=stated.get("params.gamma", 0.1),
        min_lr=stated.get("params.end_factor", 0.0) * lr,
        warmup_lr=stated["warmup_start"] * lr,
        warmup_epochs=stated["warmup_epochs"],
        warmup_prefix=prefix,
        step_on_epochs=not per_step,
        updates_per_epoch=STEPS_PER_EPOCH,
    )
    rates = []
    for step in range(epochs * STEPS_PER_EPOCH):
        if per_step:
            scheduler.step_update(step)
        else:
            scheduler.step(step // STEPS_PER_EPOCH)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_equal_scheduler_of_source(name: str) -> None:
    settings = load_experiment(name).optimizer
    schedule, rate = settings.schedule, settings.learning_rate
    rates = [
        rate * schedule.factor(*divmod(step, STEPS_PER_EPOCH), STEPS_PER_EPOCH, rate)
        for step in range(schedule.epochs * STEPS_PER_EPOCH)
    ]
    assert rates == pytest.approx(reference_rates(name), rel=1e-6, abs=1e-6 * rate)
