"""The training loop: epochs of steps, with reports, validation, checkpoints and graceful stops."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zoo.data.dataset import Batch
from zoo.data.loader import Loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.seeding import random_of
from zoo.data.transforms.mixing import draw_mix, mix_images, mix_targets, partners
from zoo.engine._checkpoint import CHECKPOINT, CheckpointWriter
from zoo.engine._meters import Reading
from zoo.engine._observers import Observer
from zoo.engine._optim import set_lr
from zoo.engine._reporting import VALIDATION, Log, Pace, metrics_since
from zoo.engine._state import TrainState, all_finite, broadcast_buffers, set_training_mode
from zoo.engine._step import StepBatch, train_step
from zoo.engine._stop import DATA_FAULT, LAG, STALL_S, StopRequested, StopSignals, ending_by
from zoo.engine._task import Result
from zoo.engine._validation import validate
from zoo.errors import CheckpointError, DataError, NonFiniteLossError, TrainingInterrupted, escape

logger = logging.getLogger(__name__)

MIXES = -1  # seeds the mix of a batch; image keys are never negative


class Trainer:
    """Trains a network on the batches of a loader.

    Args:
    - `state`: the state of the run, which is updated in place.
    - `train_loader`: this process's batches.
    - `val_loader`: the images of the validation that ends each epoch; None for no validation.
    - `log`: receives averages and validations.
    - `log_dir`: folder of the checkpoints.
    - `observers`: are called in this order.
    - `log_interval`: number of batches between two reports.
    """

    def __init__(
        self,
        state: TrainState,
        train_loader: Loader[TrainBatches],
        val_loader: Loader[ValBatches] | None,
        log: Log,
        log_dir: Path,
        *,
        observers: Sequence[Observer] = (),
        log_interval: int = 10,
    ) -> None:
        self.state, self.config = state, state.config
        self.train_loader, self.val_loader, self.batches = train_loader, val_loader, train_loader.batch_sampler
        self.log, self.log_dir, self.log_interval = log, log_dir, log_interval
        self.observers = observers
        self.stop = StopSignals(state.process)
        self.writer = CheckpointWriter(state.process, log_dir)
        self.pace = Pace()
        self._fault = ""  # error that ended this rank's batches, as text: an exception would keep the workers alive

    def train(self) -> Result | None:
        """Train to the end of the schedule, or until scores are stale; return the result of the last validation.

        Every rank has to call it. Each epoch ends with a validation and a checkpoint; ``checkpoint.every_steps`` adds
        checkpoints within epochs. They are written in the background, and all of them are complete when this returns or
        raises.

        SIGTERM and SIGINT save the state and raise TrainingInterrupted, also if the next batch never comes. Images that
        cannot be read save the state, too, and raise DataError on every rank; in the first `LAG` steps of an epoch
        several ranks raise without saving. During validation the saved state is the state at the end of the epoch, and
        a resumed run starts with the validation. Raises NonFiniteLossError and CheckpointError without saving; a failed
        write raises at the next report or save, or at the end. Returns None without validation, and if all epochs are
        done already.
        """
        result, request = None, None
        with self.stop, self.writer:
            try:
                try:
                    while not self.state.is_done:
                        self._train_epoch()
                        result = self._finish_epoch()
                except StopRequested as error:
                    request = error.with_traceback(None)  # the traceback refers to the workers
                if request is not None:
                    self._stop_between_batches(request)
            except BaseException:
                # Here, while signals are still handled: a worker that hangs would keep the process from ending.
                self.train_loader.stop_workers()
                if self.val_loader is not None:
                    self.val_loader.stop_workers()
                raise
        return result

    def _train_epoch(self) -> None:
        """Take the remaining steps of the running epoch."""
        state, num_batches = self.state, len(self.batches)
        self.batches.set_epoch(state.epoch)
        self.batches.skip_to(state.batch)
        set_training_mode(state)
        reported = state.meter.read(reduce=True)
        title = f"epoch {state.epoch + 1}/{self.config.optimizer.schedule.epochs}"
        with self.log.progress(title, num_batches, state.batch) as advance:
            for batches in self.pace.timed(self.stop.waits(self._steps())):
                lr = self._set_lr()
                step_batches = [self._prepared(batch) for batch in batches]
                for observer in self.observers:
                    observer.before_step(state, step_batches)
                self._step(step_batches)
                for observer in self.observers:
                    observer.after_step(state)
                advance(1)
                if state.batch % self.log_interval == 0 or state.batch == num_batches:
                    reported = self._report(reported, lr)
                every_steps = self.config.checkpoint.every_steps
                if every_steps and state.step % every_steps == 0:
                    self._save()
                self._stop_if_asked(self.stop.agreed())

    def _steps(self) -> Iterator[tuple[Batch, ...]]:
        """Yield this process's batches of each step, one for each replica that it runs.

        If batches end with an error, all ranks stop after the same step. Several ranks need `LAG` further steps to
        agree, so each of them reads as many steps ahead.
        """
        is_alone = self.state.process.control is None
        ahead: deque[tuple[Batch, ...]] = deque()
        try:
            for batches in zip(*[iter(self.train_loader)] * len(self.batches.own_replicas), strict=True):
                ahead.append(batches)
                if is_alone or len(ahead) > LAG:
                    yield ahead.popleft()
        except DataError as error:
            self._fault = str(error)
            self.stop.ask()
        yield from ahead
        if self._fault:
            if is_alone:
                self._stop_if_asked(self.stop.agreed())
            raise DataError(self._fault)

    def _step(self, batches: list[StepBatch]) -> None:
        """Take a step. Raises NonFiniteLossError, on every rank, if a gradient exceeds the range of exact sums."""
        try:
            train_step(self.state, *batches)
        except OverflowError as error:
            raise self._not_finite(f"{error}, at step {self.state.step + 1}") from error

    def _prepared(self, batch: Batch) -> StepBatch:
        """Return ``batch`` on the device, mixed."""
        state = self.state
        images = batch.on(state.process.device)
        targets = batch.targets.to(state.process.device, non_blocking=True)
        images, targets = self._mixed(images, targets)
        if self.config.training.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return StepBatch(images, targets, self.batches.global_size(state.batch))

    def _mixed(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and targets of a batch, mixed according to the settings."""
        state, config = self.state, self.config
        settings = config.regularization
        generator = random_of(config.seed, state.epoch, state.batch, MIXES)
        height, width = images.shape[-2:]
        mix = draw_mix(settings, height, width, generator)
        if mix is None:
            return images, targets
        half = config.optimizer.batch_size // (config.optimizer.replicas or state.process.world_size) // 2
        indices = partners(len(images), half).to(images.device, non_blocking=True)
        return mix_images(images, mix, indices), mix_targets(targets, config.network.num_classes, mix, indices)

    def _set_lr(self) -> float:
        """Set the learning rate of the next step and return it."""
        state, settings = self.state, self.config.optimizer
        factor = settings.schedule.factor(state.epoch, state.batch, len(self.batches), settings.learning_rate)
        set_lr(state.optimizer, factor)
        return settings.learning_rate * factor

    def _report(self, reported: Reading, lr: float) -> Reading:
        """Log the averages since the reading ``reported`` and over the epoch; return the new reading.

        Synchronizes with the device.
        """
        now = self._checked_reading()
        self.writer.raise_if_failed()
        self.log.train_metrics(metrics_since(reported, now, self.state, len(self.batches), lr, self.pace))
        return now

    def _finish_epoch(self) -> Result | None:
        """Validate, advance to the next epoch and save; return the result of the validation.

        Copies rank 0's running statistics to all ranks.
        """
        state = self.state
        # Answer a signal that arrived during the last step before a validation of several minutes.
        self._stop_if_asked(self.stop.agreed_at_once())
        broadcast_buffers(state)
        for observer in self.observers:
            observer.before_validation(state)
        result = None if self.val_loader is None else self._validation(self.val_loader)
        is_best = False
        if result is not None:
            is_best = state.epoch == 0 or result.score > state.best_score
            if is_best:
                state.best_score, state.best_epoch = result.score, state.epoch
            ranked = sorted([*state.ranking, (result.score, state.epoch)], key=lambda entry: (-entry[0], entry[1]))
            state.ranking = ranked[: self.config.checkpoint.keep_best]
            self.log.validation(state.epoch, state.step, result, is_best)
        for observer in self.observers:
            observer.after_epoch(state, result)
        state.epoch, state.batch = state.epoch + 1, 0
        state.meter.reset()
        self._save(is_best)
        self._stop_if_asked(self.stop.agreed_at_once(), saved=True)
        return result

    def _validation(self, loader: Loader[ValBatches]) -> Result:
        """Validate the network, or its moving average."""
        state, settings = self.state, self.config
        with self.log.progress(VALIDATION, len(loader)) as advance:
            return validate(
                state.scored_model,
                state.task,
                self._val_batches(loader),
                state.process.device,
                state.process.world_size,
                protocol=state.task.own_protocol,
                amp=settings.training.amp,
                advance=advance,
            )

    def _val_batches(self, loader: Loader[ValBatches]) -> Iterator[Batch]:
        """Yield this rank's validation batches; raise StopRequested on every rank once all agree to stop.

        All ranks have to take part in equally many all-reduces, although a rank may have a batch fewer than rank 0.
        """
        own = self.stop.waits(loader)
        for _ in range(loader.batch_sampler.num_batches(rank=0)):
            try:
                batch = next(own, None)
            except DataError as error:
                self._fault, batch = str(error), None
                self.stop.ask()
            if batch is not None:
                yield batch
            name = self.stop.agreed()
            if name is not None:
                raise StopRequested(name, is_agreed=True)
        if self.stop.agreed_at_once() == DATA_FAULT:  # in one of the last batches
            raise StopRequested(DATA_FAULT, is_agreed=True)

    def _save(self, is_best: bool = False) -> None:
        """Start to write a checkpoint. Raises NonFiniteLossError on every rank if a loss or a weight is not finite."""
        self._checked_reading()
        # A finite loss may have infinite gradients, which only the next loss would show.
        if self.state.process.any_rank(not all_finite(self.state.model)):
            raise self._not_finite(f"the weights are not finite after step {self.state.step}")
        self.writer.save(self.state, is_best)

    def _checked_reading(self) -> Reading:
        """Return the averages of the running epoch over all ranks (an all-reduce that waits for the device).

        Raises NonFiniteLossError, on every rank, if a loss was not finite.
        """
        reading = self.state.meter.read(reduce=True)
        if reading.first_bad_step is not None:
            raise self._not_finite(f"the loss was not finite at step {reading.first_bad_step}")
        return reading

    def _not_finite(self, what: str) -> NonFiniteLossError:
        self.writer.join_quietly()  # the checkpoint being written is the last good one
        path = self.log_dir / CHECKPOINT
        last_good = f"the last good checkpoint is {escape(path)}"
        place = last_good if path.exists() else f"{escape(self.log_dir)} has no checkpoint yet"
        return NonFiniteLossError(
            f"{what}; {place}: lower optimizer.learning_rate, or set optimizer.clip or optimizer.schedule.warmup_epochs"
        )

    def _stop_between_batches(self, request: StopRequested) -> None:
        """Save the state and raise TrainingInterrupted; end without saving if other ranks cannot take part."""
        if not request.is_agreed and not self.stop.await_ranks(self.state.step):
            logger.warning(
                "%s: no batch came for %.0f s, and other processes are in a step: nothing is saved; continue from the "
                "last checkpoint with --resume auto",
                request.signal_name,
                STALL_S,
            )
            raise ending_by(signal.Signals[request.signal_name])
        self._stop_if_asked(request.signal_name)

    def _stop_if_asked(self, reason: str | None, saved: bool = False) -> None:
        """Stop for ``reason``, if any: save unless ``saved``; raise TrainingInterrupted, or DataError for a fault."""
        if reason is None:
            return
        if reason == DATA_FAULT:
            raise self._saved_fault()
        if not saved:
            self._save()
        self.writer.join()
        state, path = self.state, self.log_dir / CHECKPOINT
        raise TrainingInterrupted(
            f"{reason} at step {state.step} (epoch {state.epoch + 1}, batch {state.batch} of "
            f"{len(self.batches)}); the state is saved in {escape(path)}: continue with --resume auto"
        )

    def _saved_fault(self) -> DataError:
        """Save, and return on every rank the error of the rank whose images cannot be read."""
        process, path = self.state.process, self.log_dir / CHECKPOINT
        text = process.broadcast(next(filter(None, process.gather(self._fault)), ""))
        try:
            if self.state.batch > 0:  # since the last epoch was saved
                self._save()
            self.writer.join()
        except CheckpointError as error:
            return DataError(f"{text}; {error}")
        if not path.exists():
            return DataError(text)
        return DataError(f"{text}; the state is saved in {escape(path)}: continue with --resume auto")
