"""The training loop: epochs of steps, with reports, checkpoints, validations and a way to stop in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, repeat
from pathlib import Path

import torch
from torch import Tensor

from zoo.data.folder import Batch
from zoo.data.loader import Loader
from zoo.data.sampler import MIN_PER_NORM, TrainBatches, ValBatches
from zoo.engine.checkpoint import CHECKPOINT, CheckpointWriter
from zoo.engine.meters import Reading, reconstruction_errors
from zoo.engine.optim import clamp_notice, lr_factor, set_lr
from zoo.engine.reporting import Log, Pace, metrics_since
from zoo.engine.state import TrainState, all_finite, settle_buffers
from zoo.engine.step import StepBatch, gradient_angle, train_step
from zoo.engine.stop import StopSignals
from zoo.engine.task import Result
from zoo.engine.validation import validate
from zoo.errors import CheckpointError, DataError, NonFiniteLossError, TrainingInterrupted, listed, printable
from zoo.spec import escape_names

NUM_SHOWN = 4  # batches of a validation whose maps are logged


@dataclass
class _Run:
    """The arguments that all functions of the loop need: the state, and the objects around it."""

    state: TrainState
    train_loader: Loader[TrainBatches]
    val_loader: Loader[ValBatches]
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
    val_loader: Loader[ValBatches],
    log: Log,
    log_dir: Path,
    *,
    log_interval: int = 10,
) -> Result | None:
    """Train from where ``state`` is to the end of the schedule; return the last validation, if there was one.

    Every rank has to call it. ``state`` is changed. Checkpoints are written to ``log_dir`` every
    ``checkpoint.every_steps`` steps and at the end of each epoch, after its validation, while training goes on; all of
    them are written when this returns or raises. ``log`` is told the averages every ``log_interval`` batches. After
    SIGTERM or SIGINT the state is saved and TrainingInterrupted raised; during a validation it is the state at the end
    of the epoch, so that a resume begins with the validation. Raises NonFiniteLossError, DataError and CheckpointError
    without saving; CheckpointError for a failed write at the next report or save, or at the end.
    """
    result = None
    with StopSignals(state.process.control) as stop, CheckpointWriter(state.process, log_dir) as writer:
        run = _Run(state, train_loader, val_loader, log, log_dir, log_interval, stop, writer)
        _check_data(run)
        _announce(run)
        try:
            while state.epoch < state.config.optimizer.schedule.epochs:
                _train_epoch(run)
                result = _finish_epoch(run)
        except BaseException:
            # While signals are still watched: a worker that hangs would keep the process from ending.
            for loader in (train_loader, val_loader):
                loader.stop_workers()
            raise
    return result


def _check_data(run: _Run) -> None:
    state, num_images = run.state, run.batches.num_images
    if state.num_images not in (0, num_images):
        raise CheckpointError(
            f"there are {num_images} training images, but the checkpoint is of a run with "
            f"{state.num_images}; training data: put the same images there to continue that run"
        )
    state.num_images = num_images
    class_names = escape_names(run.train_loader.dataset.classes)
    if state.class_names not in (None, class_names):
        before, now = set(state.class_names or ()), set(class_names)
        only_there, only_here = (listed(sorted(names)) or "none" for names in (before - now, now - before))
        how = f"only there: {only_there}; only here: {only_here}" if before != now else "their order is another one"
        raise CheckpointError(
            f"the classes are not those of the checkpoint ({how}); {printable(run.train_loader.dataset.root)}: put the "
            "same data there to continue that run, or start a new one with --weights and another --log-dir"
        )
    state.class_names = class_names


def _announce(run: _Run) -> None:
    """Log the consequences of the settings that a user may not expect."""
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
    """Take the steps of the running epoch that are still to be taken."""
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
    """Return ``batch`` on the device; log and count its images that could not be read."""
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
    images = batch.on(state.process.device)
    if state.config.training.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    if state.step == 0:
        run.log.images(state.step, images)
    targets = batch.targets.to(state.process.device, non_blocking=True)
    return StepBatch(images, targets, run.batches.global_size(state.batch))


@contextmanager
def _reconstruction_metered(run: _Run) -> Iterator[None]:
    """Log the reconstruction errors of the step inside, if the settings ask for them in this step."""
    state, every_steps = run.state, run.state.config.training.reconstruction_meter
    if not every_steps or (state.step + 1) % every_steps:
        yield
        return
    with reconstruction_errors(state.model) as errors:
        yield
    run.log.reconstruction(state.step, errors)


def _meter_gradient_angle(run: _Run, batch: StepBatch) -> None:
    """Log the angle between the gradients of the coming step, if the settings ask for it in this step."""
    state, every_steps = run.state, run.state.config.training.gradient_angle_meter
    if every_steps and (state.step + 1) % every_steps == 0:
        run.log.gradient_angle(state.step + 1, gradient_angle(state, batch))


def _set_lr(run: _Run) -> float:
    """Set the rate of the coming step and return it."""
    state, settings = run.state, run.state.config.optimizer
    factor = lr_factor(settings.schedule, state.epoch, state.batch, len(run.batches), settings.learning_rate)
    set_lr(state.optimizer, factor)
    return settings.learning_rate * factor


def _report(run: _Run, reported: Reading, lr: float) -> Reading:
    """Log the averages since the reading ``reported`` and of the epoch; return those of the epoch.

    It waits for the device."""
    now = _checked_reading(run)
    run.writer.check()
    run.log.train_metrics(metrics_since(reported, now, run.state, len(run.batches), lr, run.pace))
    run.log.parameters(run.state.step, run.state.model)
    return now


def _finish_epoch(run: _Run) -> Result:
    """Validate, count the epoch as done and save; return the scores."""
    state = run.state
    # A signal that came during the last step is answered now, and not after a validation of several minutes.
    _stop_if_asked(run, run.stop.agreed_at_once())
    skipped = state.meter.read(reduce=True).skipped
    if skipped:
        run.log.message(f"epoch {state.epoch + 1}: {skipped} training image{'s' * (skipped > 1)} could not be read")
    try:
        result = _validation(run)
    except _StopInValidation as asked:
        _stop_if_asked(run, str(asked))
        raise
    is_best = state.epoch == 0 or result.score > state.best_score
    if is_best:
        state.best_score, state.best_epoch = result.score, state.epoch
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
            state.task,
            _val_batches(run),
            state.process.device,
            state.process.world_size,
            num_images=run.val_loader.batch_sampler.num_images,
            protocol=state.task.own_protocol,
            amp=settings.training.amp,
            advance=advance,
            record=_class_maps(run),
        )


def _class_maps(run: _Run) -> Callable[[Batch, Tensor], None]:
    """Return a function that logs the task's maps for a few of rank 0's batches, the same in every validation."""
    state, num_batches, seen = run.state, len(run.val_loader), count()
    chosen = {index * num_batches // NUM_SHOWN for index in range(NUM_SHOWN)} if state.process.is_main else set()

    def record(batch: Batch, logits: Tensor) -> None:
        if (index := next(seen)) in chosen and (maps := state.task.class_maps(logits, batch.targets)):
            run.log.class_maps(state.step, f"val/image{index}", batch.finished(batch.images)[0], maps)

    return record


class _StopInValidation(Exception):
    """All ranks agreed to stop in the middle of the same validation; the text is the name of the signal."""


def _val_batches(run: _Run) -> Iterator[Batch]:
    """Yield this rank's batches to validate; raise _StopInValidation on every rank once they agree on a signal.

    All ranks have to exchange messages equally often, although a rank may have a batch fewer than rank 0.
    """
    batches, world_size = run.val_loader.batch_sampler, run.state.process.world_size
    largest_share = -(-batches.num_images // world_size)
    num_exchanges = -(-largest_share // batches.batch_size)
    for batch in chain(run.val_loader, repeat(None, num_exchanges - len(batches))):
        if batch is not None:
            yield batch
        name = run.stop.agreed()
        if name is not None:
            raise _StopInValidation(name)


def _save(run: _Run, is_best: bool = False) -> None:
    """Write a checkpoint; NonFiniteLossError, on every rank, if a loss of the epoch or any weight is not finite."""
    _checked_reading(run)
    # A finite loss can have gradients that are not finite, which only the next loss would show.
    if run.state.process.any_rank(not all_finite(run.state.model)):
        raise _not_finite(run, f"the weights are not finite after step {run.state.step}")
    run.writer.save(run.state, is_best)


def _checked_reading(run: _Run) -> Reading:
    """Return the averages of the running epoch over all ranks; every rank has to call it, and waits.

    NonFiniteLossError, on every rank, if any loss was not finite.
    """
    reading = run.state.meter.read(reduce=True)
    if reading.first_bad_step is not None:
        raise _not_finite(run, f"the loss was not finite at step {reading.first_bad_step}")
    return reading


def _not_finite(run: _Run, what: str) -> NonFiniteLossError:
    run.writer.wait()  # the checkpoint that is being written is the last good one
    path = run.log_dir / CHECKPOINT
    last_good = f"the last good checkpoint is {printable(path)}"
    place = last_good if path.exists() else f"{printable(run.log_dir)} has no checkpoint yet"
    return NonFiniteLossError(
        f"{what}; {place}: lower optimizer.learning_rate, or set optimizer.clip or optimizer.schedule.warmup_epochs"
    )


def _stop_if_asked(run: _Run, signal_name: str | None, saved: bool = False) -> None:
    """Save, unless that is done, and raise TrainingInterrupted if the ranks agreed on a signal."""
    if signal_name is None:
        return
    if not saved:
        _save(run)
    run.writer.settle()
    state, path = run.state, run.log_dir / CHECKPOINT
    raise TrainingInterrupted(
        f"{signal_name} at step {state.step} (epoch {state.epoch + 1}, batch {state.batch} of {len(run.batches)}); the "
        f"state is saved in {printable(path)}: continue with --resume auto"
    )
