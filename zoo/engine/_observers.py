"""Observers of a training run. The loop notifies them of steps and epochs; they do not change its results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from torch import Tensor, nn

from zoo.data.dataset import ImageDataset
from zoo.data.loader import Loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.seeding import seed_global_generators
from zoo.engine._digest import digest, state_tensors
from zoo.engine._reconstruction import angle_between, gradients, reconstructs
from zoo.engine._replicas import SynchronizedReplicas
from zoo.engine._reporting import Log
from zoo.engine._state import TrainState, shared_state
from zoo.engine._step import StepBatch, compute_loss, micro_batches
from zoo.engine._task import Result
from zoo.engine._wrapping import unwrap
from zoo.errors import ConfigError

logger = logging.getLogger(__name__)

Callback = Callable[[Mapping[str, float]], object]


class Observer:
    """Base class of observers of a training run. Its methods do nothing.

    All ranks call a method at the same time, so methods may communicate. They must change neither ``state`` nor the
    random generators.
    """

    def before_step(self, state: TrainState, batches: Sequence[StepBatch]) -> None:
        """Receive this process's batches of the next step, one for each replica that it runs."""

    def after_step(self, state: TrainState) -> None:
        """Receive the state after each step."""

    def before_validation(self, state: TrainState) -> None:
        """Receive the state after the last step of each epoch, in a run without validation too."""

    def after_epoch(self, state: TrainState, result: Result | None) -> None:
        """Receive the state at the end of each epoch, and the result of its validation; None without validation."""


def build_observers(
    state: TrainState, train_loader: Loader[TrainBatches], val_loader: Loader[ValBatches] | None, log: Log
) -> list[Observer]:
    """Build the observers that the settings of a run request.

    Raises ConfigError like `GradientAngle`, and for its meter beside synchronized replicas.
    """
    config = state.config
    observers: list[Observer] = [
        AbsentClasses(train_loader.dataset, None if val_loader is None else val_loader.dataset)
    ]
    if config.training.gradient_angle_meter:
        if isinstance(state.replicas, SynchronizedReplicas):
            raise ConfigError(
                f"training.gradient_angle_meter = {config.training.gradient_angle_meter} runs one replica alone, but "
                "norms are synchronized over optimizer.replicas: remove one of the two settings, or use other norms"
            )
        observers.append(GradientAngle(state.model, config.training.gradient_angle_meter, log))
    if config.optimizer.replicas is not None:
        observers.append(Digest(log))
    return observers


class AbsentClasses(Observer):
    """Warns after the first epoch of classes without labels: a run can neither learn nor score them.

    Args:
    - `train_images`: the training images.
    - `val_images`: the validation images; None without validation.
    """

    def __init__(self, train_images: ImageDataset, val_images: ImageDataset | None) -> None:
        self._train_images, self._val_images = train_images, val_images

    def before_validation(self, state: TrainState) -> None:
        """Warn of classes that no training crop of the first epoch had."""
        if state.epoch == 0:
            counts = state.task.class_counts(state.meter.read(reduce=True))
            self._warn("the training crops of epoch 1", self._train_images, counts)

    def after_epoch(self, state: TrainState, result: Result | None) -> None:
        """Warn of classes that no validation image has."""
        if state.epoch == 0 and result is not None and self._val_images is not None:
            self._warn("the validation data", self._val_images, result.class_counts())

    @staticmethod
    def _warn(where: str, images: ImageDataset, counts: list[int] | None) -> None:
        if counts is not None and (what := images.describe_absent(counts)):
            logger.warning("%s; %s", what, where)


class GradientAngle(Observer):
    """Records the angle between the gradients from reconstructed and from stored activations.

    Raises ConfigError if the network reconstructs nothing.

    Args:
    - `model`: the bare network.
    - `every_steps`: number of steps between two measurements.
    - `log`: receives the angles.
    """

    def __init__(self, model: nn.Module, every_steps: int, log: Log) -> None:
        if not reconstructs(model):
            raise ConfigError(
                f"training.gradient_angle_meter = {every_steps}, but this network reconstructs no activations: remove "
                'the key, or use a reversible network with network.memory "auto"'
            )
        self._every_steps, self._log = every_steps, log

    def before_step(self, state: TrainState, batches: Sequence[StepBatch]) -> None:
        """Record the angle of the next step's first batch, if it is due."""
        number = state.step + 1
        if number % self._every_steps == 0:
            self._log.record("gradient_angle", step=number, degrees=gradient_angle(state, batches[0]))


def gradient_angle(state: TrainState, batch: StepBatch) -> float:
    """Return the angle in degrees between the gradients from reconstructed and from stored activations.

    The gradients come from this batch alone, before clipping; NaN if one is not finite. Every rank has to call it,
    because norms may be synchronized. Does not change ``state``: the next step is bit-identical. Synchronizes with the
    device.
    """
    network = unwrap(state.wrapped_model)  # avoids averaging over ranks, and compiling only for these gradients

    def losses() -> Iterator[Tensor]:
        for images, targets in micro_batches(state, batch):
            _, loss = compute_loss(state, network, images, targets)
            yield state.scaler.scale(loss)

    return angle_between(gradients(network, losses, store=False), gradients(network, losses, store=True))


class Callbacks(Observer):
    """Calls functions on rank 0 with the metrics of each epoch, after its validation.

    The metrics are numbers by name: ``epoch`` (from 1), ``step``, ``lr`` of the last step, ``train/loss`` and the
    training scores as means over the epoch, and ``val/loss`` and the validation scores. Random numbers that a function
    draws change none of the run's. An error that a function raises ends the run.

    Args:
    - `callbacks`: the functions, called in this order.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def after_epoch(self, state: TrainState, result: Result | None) -> None:
        """Call all functions."""
        reading = state.meter.read(reduce=True)
        settings, group = state.config.optimizer, state.optimizer.param_groups[0]
        metrics = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "lr": settings.learning_rate * group["lr"] / group["initial_lr"],
            "train/loss": reading.loss,
            **{f"train/{name}": score for name, score in state.task.scores(reading).items()},
        }
        if result is not None:
            metrics |= {"val/loss": result.loss, **{f"val/{name}": score for name, score in result.scores().items()}}
        state.process.on_main(lambda: self._call(metrics))

    def _call(self, metrics: Mapping[str, float]) -> None:
        with seed_global_generators(Random(0)):
            for callback in self._callbacks:
                callback(dict(metrics))


class Digest(Observer):
    """Records the digest of weights, buffers and optimizer state at the end of each epoch.

    Args:
    - `log`: receives the digests.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    def after_epoch(self, state: TrainState, result: Result | None) -> None:
        """Record the digest of the state."""
        sha256 = digest(state_tensors(shared_state(state)))
        logger.info("epoch %d digest: %s", state.epoch + 1, sha256)
        self._log.record("digest", epoch=state.epoch, step=state.step, sha256=sha256)
