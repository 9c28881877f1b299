"""Figure 4 of Gomez et al. 2017: the angle between gradients from stored and from reconstructed activations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.data.folder import ImageFolder
from zoo.data.transforms import val_transform
from zoo.errors import DataError, printable
from zoo.layers.reversible import ReversibleSequential
from zoo.registry import CIFAR_INPUT
from zoo.reproduce.comparison import Comparison, Line, Panel, Section, Verdict, not_measured, unpublished
from zoo.reproduce.error_rates import needs_training
from zoo.reproduce.paper_networks import build_for_training
from zoo.reproduce.published_numbers import published

NETWORKS = {"revnet38_cifar": 60, "revnet164_cifar": 20}  # and the number of training steps of each
MEASUREMENTS = 6  # over the training, the first before it
BATCH = 16
SIZE = 32
CLASSES = 10
LR = 0.1

Batches = Iterator[tuple[Tensor, Tensor]]


class Angles(NamedTuple):
    """Angles between gradients at one training step, in degrees.

    Args:
    - `step`: the number of training steps before the measurement.
    - `between`: angle between the gradients with stored and with reconstructed activations.
    - `stored`, `reconstructed`: angle between each of these float32 gradients and the one with stored activations in
      float64.
    """

    step: int
    between: float
    stored: float
    reconstructed: float


def open_images(data: Path, batch: int = BATCH) -> ImageFolder:
    """Return the images below train/; DataError unless they make a batch, of classes that the networks have."""
    images = ImageFolder(data / "train", val_transform(SIZE, SIZE, CIFAR_INPUT.mean, CIFAR_INPUT.std))
    if len(images) < batch or len(images.classes) > CLASSES:
        raise DataError(
            f"{len(images)} images of {len(images.classes)} classes; {printable(images.root)}: give at least "
            f"{batch} images of at most {CLASSES} classes, as CIFAR-10 has them"
        )
    return images


def measure_angles(data: ImageFolder | None, networks: dict[str, int] | None = None, batch: int = BATCH) -> Section:
    """Train each of the ``networks`` for its number of steps and return the angles at some of them.

    Without ``data`` the images are random and so are the labels.
    """
    networks = NETWORKS if networks is None else networks
    images = "random images (with --data DIR those of CIFAR-10)" if data is None else f"images of {data.root}"
    steps = ", ".join(f"{name} {count} steps" for name, count in networks.items())
    section = Section(
        "figure4", "Figure 4: angle between stored and reconstructed gradients",
        f"Trained with SGD, batch {batch}, lr {LR}, momentum 0.9, on {images}: {steps}; the paper's RevNet-164 was "
        "trained for 160 epochs and more with batches of 100. In each measurement, all three gradients belong to the "
        "same weights and images. Angle: 2 arcsin(|u - v| / 2) of the unit vectors.",
    )  # fmt: skip
    section.notes.append(
        "the paper shows the angle over a whole training on CIFAR-10, of which these are only the first steps: they "
        "neither confirm nor contradict that it rises over the whole training. The paper states no bound: its axis "
        "ends at 10 degrees"
    )
    for name, count in networks.items():
        torch.manual_seed(0)
        angles = _train(build_for_training(name), _batches(data, batch), count)
        between = [a.between for a in angles]
        stored, reconstructed = [a.stored for a in angles], [a.reconstructed for a in angles]
        section.comparisons += [
            Comparison(
                f"{name}: stored to reconstructed, largest",
                published("revnet", "figure4/largest"),
                max(between),
                "degrees",
                Verdict("underpowered", "the first steps of a training"),
            ),
            Comparison(
                f"{name}: stored to reconstructed, first to last",
                published("revnet", "figure4/trend"),
                f"{between[0]:.2g} to {between[-1]:.2g}",
                "degrees",
                Verdict("underpowered", "the first steps of a training"),
            ),
            unpublished(f"{name}: stored to float64, largest", max(stored), "degrees"),
            unpublished(f"{name}: reconstructed to float64, largest", max(reconstructed), "degrees"),
        ]
        steps_measured = [a.step for a in angles]
        lines = [
            Line("stored to reconstructed", steps_measured, between),
            Line("stored to float64", steps_measured, stored),
            Line("reconstructed to float64", steps_measured, reconstructed),
        ]
        section.panels.append(Panel(name, "training step", "angle, degrees", lines, y_log=True))
    for key in ("more_epochs", "training_loss", "error"):
        number = published("revnet", f"figure4/{key}")
        section.comparisons.append(not_measured(number.quantity, number, number.unit, needs_training(number.network)))
    return section


def report_curves() -> Section:
    """Return Figure 3."""
    section = Section("figure3", "Figure 3: training curves on ImageNet", "")
    for key in ("epochs", "slowdown"):
        number = published("revnet", f"figure3/{key}")
        section.comparisons.append(not_measured(number.quantity, number, number.unit, needs_training(number.network)))
    return section


def _train(model: nn.Module, batches: Batches, steps: int) -> list[Angles]:
    """Train and return the angles at equal distances, the first before and the last after the training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=2e-4)
    measured_steps = {round(index * steps / (MEASUREMENTS - 1)) for index in range(MEASUREMENTS)}
    angles = []
    for step in range(steps + 1):
        images, classes = next(batches)
        if step in measured_steps:
            angles.append(_measure(step, model, images, classes))
        optimizer.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
    return angles


def _measure(step: int, model: nn.Module, images: Tensor, classes: Tensor) -> Angles:
    stored = gradients(model, images, classes, store=True)
    reconstructed = gradients(model, images, classes, store=False)
    exact = gradients(copy.deepcopy(model).double(), images.double(), classes, store=True)
    return Angles(step, angle(stored, reconstructed), angle(stored, exact), angle(reconstructed, exact))


def gradients(model: nn.Module, images: Tensor, classes: Tensor, *, store: bool) -> Tensor:
    """Return the gradient with respect to all parameters as one vector; the model's running statistics do not change.

    With ``store`` the reversible chains keep their activations, without it they reconstruct them.
    """
    model = copy.deepcopy(model)
    for chain in model.modules():
        if isinstance(chain, ReversibleSequential):
            chain.store = store
    loss = F.cross_entropy(model(images), classes)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def angle(u: Tensor, v: Tensor) -> float:
    """Return the angle between two vectors in degrees, exact for small ones too."""
    u, v = u.double() / u.double().norm(), v.double() / v.double().norm()
    return math.degrees(2 * math.asin(min(1.0, float((u - v).norm()) / 2)))


def _batches(data: ImageFolder | None, batch: int) -> Batches:
    """Yield images (batch, 3, SIZE, SIZE) and their classes without end."""
    while data is None:
        yield torch.randn(batch, 3, SIZE, SIZE), torch.randint(CLASSES, (batch,))
    while True:
        order = torch.randperm(len(data)).tolist()
        for start in range(0, len(order) - batch + 1, batch):
            samples = [data[0, index] for index in order[start : start + batch]]
            images = [sample.image for sample in samples if sample.image is not None]
            yield torch.stack(images), torch.tensor([sample.target for sample in samples])
