"""The training loop: epochs of steps, with logging, checkpoints, validation and graceful stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor

from zoo.data.folder import Batch
from zoo.data.loader import Loader
from zoo.data.mixing import draw_mix, mix_images, mix_targets, partners
from zoo.data.sampler import MIN_PER_NORM, TrainBatches, ValBatches
from zoo.data.seeding import random_of
from zoo.engine.checkpoint import CHECKPOINT, CheckpointWriter
from zoo.engine.meters import Reading, reconstruction_errors
from zoo.engine.optim import lr_factor, set_lr
from zoo.engine.reporting import Log, Pace, metrics_since
from zoo.engine.state import TrainState, all_finite, broadcast_buffers
from zoo.engine.step import StepBatch, gradient_angle, train_step
from zoo.engine.stop import StopSignals
from zoo.engine.task import Result
from zoo.engine.validation import validate
from zoo.errors import CheckpointError, DataError, NonFiniteLossError, TrainingInterrupted, escape, join_names
from zoo.spec import escape_names

MIXES = -1  # with seed, epoch and batch the seed of a mix; keys of images have no negative number


@dataclass
class _Run:
    """What all functions of the loop need: the state, and the objects around it."""

    state: TrainState
    train_loader: Loader[TrainBatches]
    val_loader: Loader[ValBatches] | None
    log: Log
    log_dir: Path
    log_interval: int
    stop: StopSignals
    writer: CheckpointWriter
    pace: Pace = field(default_factory=Pace)

    @property
    def batches(self) -> TrainBatches:
        return self.train_loader.batch_sampler


def train(
    state: TrainState,
    train_loader: Loader[TrainBatches],
    val_loader: Loader[ValBatches] | None,
    log: Log,
    log_dir: Path,
    *,
    log_interval: int = 10,
) -> Result | None:
    """Train from the position of ``state`` to the end of the schedule; return the result of the last validation.

    Every rank has to call it. ``state`` is updated in place. Each epoch ends with a validation, unless ``val_loader``
    is None, and a checkpoint in ``log_dir``; ``checkpoint.every_steps`` adds checkpoints within epochs. They are
    written in the background, and all of them are complete when this returns or raises. ``log`` receives the averages
    every ``log_interval`` batches.

    SIGTERM and SIGINT save the state and raise TrainingInterrupted. During validation the saved state is that of the
    end of the epoch, and a resumed run starts with the validation. Raises NonFiniteLossError, DataError and
    CheckpointError without saving; a failed write raises at the next report or save, or at the end. Returns None
    without validation, and if all epochs are done already.
    """
    result = None
    with StopSignals(state.process.control) as stop, CheckpointWriter(state.process, log_dir) as writer:
        run = _Run(state, train_loader, val_loader, log, log_dir, log_interval, stop, writer)
        _check_data(run)
        _log_merged_batch(run)
        try:
            while state.epoch < state.config.optimizer.schedule.epochs:
                _train_epoch(run)
                result = _finish_epoch(run)
        except BaseException:
            # Here, while signals are still handled: a worker that hangs would keep the process from ending.
            train_loader.stop_workers()
            if val_loader is not None:
                val_loader.stop_workers()
            raise
    return result


def _train_epoch(run: _Run) -> None:
    """Take the remaining steps of the running epoch."""
    state, num_batches = run.state, len(run.batches)
    run.batches.set_epoch(state.epoch)
    run.batches.skip_to(state.batch)
    state.wrapped_model.train()
    reported = state.meter.read(reduce=True)
    title = f"epoch {state.epoch + 1}/{state.config.optimizer.schedule.epochs}"
    with run.log.progress(title, num_batches, state.batch) as advance:
        for batch in run.pace.timed(run.train_loader):
            lr = _set_lr(run)
            step_batch = _prepared(run, batch)
            _meter_gradient_angle(run, step_batch)
            with _reconstruction_metered(run):
                train_step(state, step_batch)
            advance(1)
            if state.batch % run.log_interval == 0 or state.batch == num_batches:
                reported = _report(run, reported, lr)
            every_steps = state.config.checkpoint.every_steps
            if every_steps and state.step % every_steps == 0:
                _save(run)
            _stop_if_asked(run, run.stop.agreed())


def _prepared(run: _Run, batch: Batch) -> StepBatch:
    """Return ``batch`` on the device; log and count its unreadable images."""
    state = run.state
    for fault in batch.skipped:
        run.log.message(f"left out: {fault}")
    state.meter.skip(len(batch.skipped))
    least = MIN_PER_NORM * state.config.optimizer.accumulate_steps
    if batch.skipped and len(batch.targets) < least:
        raise DataError(
            f"only {len(batch.targets)} images of a batch are readable, but batch statistics need {least}",
            run.train_loader.dataset.root,
            f"repair the images, the last is: {batch.skipped[-1]}",
        )
    images = batch.on(state.process.device)
    targets = batch.targets.to(state.process.device, non_blocking=True)
    images, targets = _mixed(run, images, targets, batch.places)
    if state.config.training.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    if state.step == 0:
        run.log.images(state.step, images)
    return StepBatch(images, targets, run.batches.global_size(state.batch))


def _mixed(run: _Run, images: Tensor, targets: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the images and targets of a batch, mixed as the settings say; ``places`` as in `Batch`."""
    state, config = run.state, run.state.config
    settings = config.regularization
    if not settings.mixes or (settings.mix_off_epoch is not None and state.epoch >= settings.mix_off_epoch):
        return images, targets
    generator = random_of(config.seed, state.epoch, state.batch, MIXES)
    height, width = images.shape[-2:]
    mix = draw_mix(settings, height, width, generator)
    if mix is None:
        return images, targets
    half = config.optimizer.batch_size // state.process.world_size // 2
    indices = partners(len(images), half, places).to(images.device, non_blocking=True)
    return mix_images(images, mix, indices), mix_targets(targets, config.network.num_classes, mix, indices)


@contextmanager
def _reconstruction_metered(run: _Run) -> Iterator[None]:
    """Context that logs the reconstruction errors of the step inside, if this step is to be metered."""
    state, every_steps = run.state, run.state.config.training.reconstruction_meter
    if not every_steps or (state.step + 1) % every_steps:
        yield
        return
    with reconstruction_errors(state.model) as errors:
        yield
    run.log.reconstruction(state.step, errors)


def _meter_gradient_angle(run: _Run, batch: StepBatch) -> None:
    """Log the angle between the gradients of the next step, if that step is to be metered."""
    state, every_steps = run.state, run.state.config.training.gradient_angle_meter
    if every_steps and (state.step + 1) % every_steps == 0:
        run.log.gradient_angle(state.step + 1, gradient_angle(state, batch))


def _set_lr(run: _Run) -> float:
    """Set the learning rate of the next step and return it."""
    state, settings = run.state, run.state.config.optimizer
    factor = lr_factor(settings.schedule, state.epoch, state.batch, len(run.batches), settings.learning_rate)
    set_lr(state.optimizer, factor)
    return settings.learning_rate * factor


def _report(run: _Run, reported: Reading, lr: float) -> Reading:
    """Log the averages since the reading ``reported`` and those of the epoch; return the new reading.

    It waits for the device.
    """
    now = _checked_reading(run)
    run.writer.raise_if_failed()
    run.log.train_metrics(metrics_since(reported, now, run.state, len(run.batches), lr, run.pace))
    run.log.parameters(run.state.step, run.state.model)
    return now


def _finish_epoch(run: _Run) -> Result | None:
    """Validate, advance to the next epoch and save; return the result of the validation."""
    state = run.state
    # Answer a signal that arrived during the last step before a validation of several minutes.
    _stop_if_asked(run, run.stop.agreed_at_once())
    skipped = state.meter.read(reduce=True).skipped
    if skipped:
        run.log.message(
            f"epoch {state.epoch + 1}: {skipped} training image{'s were' if skipped > 1 else ' was'} unreadable"
        )
    try:
        result = None if run.val_loader is None else _validation(run, run.val_loader)
    except _StopInValidation as asked:
        _stop_if_asked(run, str(asked))
        raise
    is_best = False
    if result is not None:
        is_best = state.epoch == 0 or result.score > state.best_score
        if is_best:
            state.best_score, state.best_epoch = result.score, state.epoch
        run.log.validation(state.epoch, state.step, result, is_best)
    state.epoch, state.batch = state.epoch + 1, 0
    state.meter.reset()
    _save(run, is_best)
    _stop_if_asked(run, run.stop.agreed_at_once(), saved=True)
    return result


def _validation(run: _Run, loader: Loader[ValBatches]) -> Result:
    """Validate the network, or its moving average, with rank 0's running statistics."""
    state, settings = run.state, run.state.config
    broadcast_buffers(state)
    with run.log.progress("validation", len(loader)) as advance:
        return validate(
            state.scored_model,
            state.task,
            _val_batches(run, loader),
            state.process.device,
            state.process.world_size,
            num_images=loader.batch_sampler.num_images,
            protocol=state.task.own_protocol,
            amp=settings.training.amp,
            advance=advance,
        )


class _StopInValidation(Exception):
    """All ranks agreed to stop during validation; the text is the name of the signal."""


def _val_batches(run: _Run, loader: Loader[ValBatches]) -> Iterator[Batch]:
    """Yield this rank's validation batches; raise _StopInValidation on every rank once all agree on a signal.

    All ranks have to take part in equally many all-reduces, although a rank may have a batch fewer than rank 0.
    """
    batches, world_size = loader.batch_sampler, run.state.process.world_size
    largest_share = -(-batches.num_images // world_size)
    num_exchanges = -(-largest_share // batches.batch_size)
    for batch in chain(loader, repeat(None, num_exchanges - len(batches))):
        if batch is not None:
            yield batch
        name = run.stop.agreed()
        if name is not None:
            raise _StopInValidation(name)


def _save(run: _Run, is_best: bool = False) -> None:
    """Start to write a checkpoint; NonFiniteLossError, on every rank, unless all losses and weights are finite."""
    _checked_reading(run)
    # A finite loss may have infinite gradients, which only the next loss would show.
    if run.state.process.any_rank(not all_finite(run.state.model)):
        raise _not_finite(run, f"the weights are not finite after step {run.state.step}")
    run.writer.save(run.state, is_best)


def _checked_reading(run: _Run) -> Reading:
    """Return the averages of the running epoch over all ranks (an all-reduce that waits for the device).

    NonFiniteLossError, on every rank, if any loss was not finite.
    """
    reading = run.state.meter.read(reduce=True)
    if reading.first_bad_step is not None:
        raise _not_finite(run, f"the loss was not finite at step {reading.first_bad_step}")
    return reading


def _not_finite(run: _Run, what: str) -> NonFiniteLossError:
    run.writer.join_quietly()  # the checkpoint being written is the last good one
    path = run.log_dir / CHECKPOINT
    last_good = f"the last good checkpoint is {escape(path)}"
    place = last_good if path.exists() else f"{escape(run.log_dir)} has no checkpoint yet"
    return NonFiniteLossError(
        f"{what}; {place}: lower optimizer.learning_rate, or set optimizer.clip or optimizer.schedule.warmup_epochs"
    )


def _stop_if_asked(run: _Run, signal_name: str | None, saved: bool = False) -> None:
    """If the ranks agreed on a signal, save unless ``saved``, and raise TrainingInterrupted."""
    if signal_name is None:
        return
    if not saved:
        _save(run)
    run.writer.join()
    state, path = run.state, run.log_dir / CHECKPOINT
    raise TrainingInterrupted(
        f"{signal_name} at step {state.step} (epoch {state.epoch + 1}, batch {state.batch} of {len(run.batches)}); the "
        f"state is saved in {escape(path)}: continue with --resume auto"
    )


def _check_data(run: _Run) -> None:
    state, num_images = run.state, run.batches.num_images
    if state.num_images not in (0, num_images):
        raise CheckpointError(
            f"{num_images} training images, but {state.num_images} in the run of the checkpoint; training data: resume "
            "with the same images"
        )
    state.num_images = num_images
    class_names = escape_names(run.train_loader.dataset.classes) or None
    if state.class_names not in (None, class_names):
        before, now = set(state.class_names or ()), set(class_names or ())
        missing, new = (join_names(sorted(names)) or "none" for names in (before - now, now - before))
        how = f"missing: {missing}; new: {new}" if before != now else "in another order"
        raise CheckpointError(
            f"the classes differ from those of the checkpoint ({how})",
            run.train_loader.dataset.root,
            "resume with the same data, or start a new run with --weights and another --log-dir",
        )
    state.class_names = class_names


def _log_merged_batch(run: _Run) -> None:
    if run.batches.merged:
        size, batch_size = run.batches.global_size(len(run.batches) - 1), run.state.config.optimizer.batch_size
        run.log.message(
            f"the last batch of each epoch has {size} images: the remainder after batches of {batch_size} is too small "
            "for a batch of its own"
        )
