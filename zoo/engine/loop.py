"""The training loop: epochs of steps, with reports, checkpoints, validations and a way to stop in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zoo.data.folder import Batch
from zoo.data.loader import Loader
from zoo.data.sampler import MIN_PER_NORM, TrainBatches, ValBatches
from zoo.engine import checkpoint
from zoo.engine.guard import check_finite, checked_reading
from zoo.engine.log import Log, TrainMetrics
from zoo.engine.meters import Reading
from zoo.engine.pace import Pace, metrics_since
from zoo.engine.protocols import Protocol
from zoo.engine.reconstruction import reconstruction_errors
from zoo.engine.schedule import clamp_notice, lr_factor, set_lr
from zoo.engine.state import TrainState, settle_buffers
from zoo.engine.step import StepBatch, train_step
from zoo.engine.stop import StopSignals
from zoo.engine.validate import Result, validate
from zoo.errors import CheckpointError, DataError, TrainingInterrupted, listed, printable
from zoo.weights.record import escaped_names

__all__ = ["Log", "TrainMetrics", "train"]


@dataclass
class _Run:
    """What the parts of the loop share: the state and everything around it that does not change."""

    state: TrainState
    train_loader: Loader[TrainBatches]
    val_loader: Loader[ValBatches]
    log: Log
    log_dir: Path
    log_interval: int
    stop: StopSignals
    pace: Pace = field(default_factory=Pace)

    @property
    def batches(self) -> TrainBatches:
        return self.train_loader.batch_sampler

    @property
    def place(self) -> str:
        state = self.state
        return f"step {state.step} (epoch {state.epoch + 1}, batch {state.batch} of {len(self.batches)})"


def train(
    state: TrainState,
    train_loader: Loader[TrainBatches],
    val_loader: Loader[ValBatches],
    log: Log,
    log_dir: Path,
    *,
    log_interval: int = 10,
) -> Result | None:
    """Train from where ``state`` is to the end of the schedule; return the last validation, if there was one.

    Every rank has to call it. Changes ``state``; writes checkpoints to ``log_dir`` every
    ``checkpoint.every_steps`` steps and, after its validation, at the end of each epoch; reports to ``log``
    every ``log_interval`` batches. Raises TrainingInterrupted after SIGTERM or SIGINT, when the state is saved (in a
    validation: that of the epoch's end, so that a resume begins with the validation); NonFiniteLossError, DataError
    and CheckpointError without saving.
    """
    result = None
    with StopSignals(state.process.control) as stop:
        run = _Run(state, train_loader, val_loader, log, log_dir, log_interval, stop)
        _check_data(run)
        _announce(run)
        while state.epoch < state.config.optimizer.schedule.epochs:
            _train_epoch(run)
            result = _finish_epoch(run)
    return result


def _check_data(run: _Run) -> None:
    state, num_images = run.state, run.batches.num_images
    if state.num_images not in (0, num_images):
        raise CheckpointError(
            f"there are {num_images} training images, but the checkpoint is of a run with "
            f"{state.num_images}; training data: put the same images there to continue that run"
        )
    state.num_images = num_images
    class_names = escaped_names(run.train_loader.dataset.classes)
    if state.class_names not in (None, class_names):
        before, now = set(state.class_names or ()), set(class_names)
        raise CheckpointError(
            f"the class folders are not those of the checkpoint (only there: {listed(sorted(before - now)) or 'none'}; "
            f"only here: {listed(sorted(now - before)) or 'none'}); {printable(run.train_loader.dataset.root)}: put "
            "the same folders there to continue that run, or start a new one with --weights and another --log-dir"
        )
    state.class_names = class_names


def _announce(run: _Run) -> None:
    """Log what the settings lead to that a user may not expect."""
    settings = run.state.config.optimizer
    num_batches = len(run.batches)
    if run.batches.merged:
        size = run.batches.global_size(num_batches - 1)
        run.log.message(
            f"the last batch of each epoch has {size} images: what is left over after batches of "
            f"{settings.batch_size} is too little for one of its own"
        )
    notice = clamp_notice(settings.schedule, num_batches, settings.learning_rate)
    if notice is not None:
        run.log.message(notice)


def _train_epoch(run: _Run) -> None:
    """Do the steps of the running epoch that are still to be done."""
    state, num_batches = run.state, len(run.batches)
    run.batches.set_epoch(state.epoch)
    run.batches.skip_to(state.batch)
    state.network.train()
    reported = state.meter.read(reduce=True)
    title = f"epoch {state.epoch + 1}/{state.config.optimizer.schedule.epochs}"
    with run.log.progress(title, num_batches, state.batch) as advance:
        for batch in run.pace.timed(run.train_loader):
            lr = _set_lr(run)
            _step(run, _prepared(run, batch))
            advance(1)
            if state.batch % run.log_interval == 0 or state.batch == num_batches:
                reported = _report(run, reported, lr)
            every_steps = state.config.checkpoint.every_steps
            if every_steps and state.step % every_steps == 0:
                _save(run)
            _stop_if_asked(run, run.stop.agreed())


def _prepared(run: _Run, batch: Batch) -> StepBatch:
    """Return ``batch`` on the device, and take note of its images that could not be read."""
    state = run.state
    for fault in batch.skipped:
        run.log.message(f"left out: {fault}")
    state.meter.skip(len(batch.skipped))
    least = MIN_PER_NORM * state.config.optimizer.accumulate_steps
    if batch.skipped and len(batch.targets) < least:
        raise DataError(
            f"only {len(batch.targets)} images of a batch can be read, and {least} are needed to take "
            f"statistics of; {printable(run.train_loader.dataset.root)}: mend the images, the last is: "
            f"{batch.skipped[-1]}"
        )
    channels_last = state.config.training.channels_last
    images = batch.images.to(
        state.process.device,
        non_blocking=True,
        memory_format=torch.channels_last if channels_last else torch.preserve_format,
    )
    if state.step == 0:
        run.log.images(state.step, images)
    targets = batch.targets.to(state.process.device, non_blocking=True)
    return StepBatch(images, targets, run.batches.global_size(state.batch))


def _step(run: _Run, batch: StepBatch) -> None:
    """Take one step; if it is the turn of the reconstruction meter, log what it shows."""
    state, every_steps = run.state, run.state.config.training.reconstruction_meter
    if not every_steps or (state.step + 1) % every_steps:
        train_step(state, batch)
        return
    with reconstruction_errors(state.model) as errors:
        train_step(state, batch)
    run.log.reconstruction(state.step, errors)


def _set_lr(run: _Run) -> float:
    """Set the rate of the coming step and return it."""
    state, settings = run.state, run.state.config.optimizer
    factor = lr_factor(settings.schedule, state.epoch, state.batch, len(run.batches), settings.learning_rate)
    set_lr(state.optimizer, factor)
    return settings.learning_rate * factor


def _report(run: _Run, reported: Reading, lr: float) -> Reading:
    """Log the averages since ``reported`` and of the epoch; return the latter. Waits for the device."""
    now = checked_reading(run.state, run.log_dir)
    run.log.train_metrics(metrics_since(reported, now, run.state, len(run.batches), lr, run.pace))
    run.log.parameters(run.state.step, run.state.model)
    return now


def _finish_epoch(run: _Run) -> Result:
    """Validate, count the epoch as done and save; return the validation."""
    state = run.state
    # A signal that came during the last step must not have to wait for the validation.
    _stop_if_asked(run, run.stop.agreed_at_once())
    skipped = state.meter.read(reduce=True)["skipped"]
    if skipped:
        run.log.message(f"epoch {state.epoch + 1}: {skipped} training image{'s' * (skipped > 1)} could not be read")
    try:
        result = _validation(run)
    except _StopInValidation as asked:
        _stop_if_asked(run, str(asked))
        raise
    is_best = state.epoch == 0 or result.top1 > state.best_top1
    if is_best:
        state.best_top1, state.best_epoch = result.top1, state.epoch
    run.log.validation(state.epoch, state.step, result, is_best)
    state.epoch, state.batch = state.epoch + 1, 0
    state.meter.reset()
    _save(run, is_best)
    _stop_if_asked(run, run.stop.agreed_at_once(), saved=True)
    return result


def _validation(run: _Run) -> Result:
    """Return the scores of the network, or of its moving average, with rank 0's running statistics."""
    state, settings = run.state, run.state.config
    settle_buffers(state)
    with run.log.progress("validation", len(run.val_loader)) as advance:
        return validate(
            state.scored_model,
            _until_asked(run),
            state.process.device,
            state.process.world_size,
            num_images=run.val_loader.batch_sampler.num_images,
            protocol=Protocol(settings.input.scale_val, settings.input.crop_val, ten_crops=False),
            amp=settings.training.amp,
            advance=advance,
        )


class _StopInValidation(Exception):
    """The ranks agreed on the signal of this name, and all are still in the same validation."""


def _until_asked(run: _Run) -> Iterator[Batch]:
    """Yield this rank's batches to validate; raise _StopInValidation on every rank once they agree on a signal.

    That takes equally many exchanges on all ranks, but a rank may have a batch fewer than rank 0.
    """
    batches, world_size = run.val_loader.batch_sampler, run.state.process.world_size
    largest_share = -(-batches.num_images // world_size)
    num_exchanges = -(-largest_share // batches.batch_size)
    for batch in run.val_loader:
        yield batch
        _leave_if_asked(run)
    for _ in range(len(batches), num_exchanges):
        _leave_if_asked(run)


def _leave_if_asked(run: _Run) -> None:
    name = run.stop.agreed()
    if name is not None:
        raise _StopInValidation(name)


def _save(run: _Run, is_best: bool = False) -> None:
    check_finite(run.state, run.log_dir)
    checkpoint.save(run.state, run.log_dir, is_best)


def _stop_if_asked(run: _Run, signal_name: str | None, saved: bool = False) -> None:
    """Save, unless that is done, and raise TrainingInterrupted if the ranks agreed on a signal."""
    if signal_name is None:
        return
    if not saved:
        _save(run)
    raise TrainingInterrupted(
        f"{signal_name} at {run.place}; the state is saved in {printable(run.log_dir / checkpoint.CHECKPOINT)}: "
        f"continue with --resume auto"
    )
