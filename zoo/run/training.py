"""Training an experiment on a folder of images, from the settings to the checkpoints, with one seed or several."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zoo.architectures import is_external
from zoo.config import Experiment, check_world_size, parse_experiment
from zoo.data.classes import check_same_classes
from zoo.data.folder import OnBadImage
from zoo.data.loader import Loader
from zoo.data.places import Place
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine.checkpoint import BEST
from zoo.engine.consistency import check_same_on_all_ranks, dataset_fingerprint, environment_fingerprint, sizes_digest
from zoo.engine.loop import train
from zoo.engine.process import Process
from zoo.engine.start import AUTO, start
from zoo.engine.state import TrainState
from zoo.engine.task import Task
from zoo.errors import ConfigError, DataError, NonFiniteLossError, listed, printable
from zoo.files import write_json
from zoo.models.external import check_logits
from zoo.registry import build_on_meta
from zoo.run.environment import describe_environment
from zoo.run.log_folder import check_place, check_unused, log_folder, writable
from zoo.run.run_log import RunLog, kept_records, validation_after
from zoo.run.seeds import SeedRun, seeds_json
from zoo.tasks import task_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOptions:
    """How a run is carried out, beside the settings of its experiment.

    Args:
    - `workers`: processes that read images, for each process of the run; 0 reads them in the process itself.
    - `on_bad_image`: "stop" raises DataError at an image that cannot be read, "skip" leaves it out and counts it.
    - `log_interval`: batches between two lines of the log.
    - `resume`: path of a checkpoint to continue from, or "auto" for the newest good one of the log folder, if there is
      one; None for a new run.
    - `weights`: path of a file of initial weights; None for random ones.
    - `overwrite`: whether an earlier run in the log folder is removed; otherwise it raises ConfigError.
    - `histograms`: whether TensorBoard gets histograms of the classifier and the last norm.
    - `allow_world_size_change`: whether a run may be resumed with another number of processes, which changes the
      results in the last bits.
    """

    workers: int = 0
    on_bad_image: OnBadImage = "stop"
    log_interval: int = 10
    resume: str | None = None
    weights: str | None = None
    overwrite: bool = False
    histograms: bool = False
    allow_world_size_change: bool = False


Loaders = tuple[Loader[TrainBatches], Loader[ValBatches]]


def train_experiment(
    config: Experiment, data: Place, log_dir: Path, process: Process, options: TrainOptions | None = None
) -> TrainState:
    """Train on ``data``/train, validate on ``data``/val after each epoch, and return the state at the end.

    `zoo.engine.loop.train` calls `zoo.engine.step.train_step` for each step, which calls the network's forward. Every
    process of a run has to call it, inside `zoo.engine.process.open_process`. Checkpoints, settings and logs are
    written to ``log_dir``. A resumed run whose epochs are all done is not trained further; the log says so. One with
    more epochs than its checkpoint's is prolonged, see `zoo.engine.start.restore`.
    Nothing is written before settings, images and network are known to be good, and the same on all processes.

    Raises ConfigError, DataError, WeightsError and CheckpointError for files and settings that do not fit, and the
    errors of `zoo.engine.loop.train`.
    """
    options = options or TrainOptions()
    _check_settings_agree(config, process, options)
    check_world_size(config, process.world_size)
    process.on_main(lambda: check_place(log_dir, data))
    task = task_of(config)
    with kept_records() as earlier:
        loaders = _build_loaders(task, data, process, options)
    train_loader, val_loader = loaders
    images = {
        "train": dataset_fingerprint(train_loader.dataset, train_loader.batch_sampler.num_images),
        "val": dataset_fingerprint(val_loader.dataset, val_loader.batch_sampler.num_images),
    }
    check_same_on_all_ranks(
        process,
        lambda: {
            "train": {**images["train"], "sizes": sizes_digest(train_loader.dataset)},
            "val": {**images["val"], "sizes": sizes_digest(val_loader.dataset)},
        },
        "copy the same DATA to every machine",
        DataError,
    )
    num_parameters = _count_parameters(config)
    with (
        log_folder(log_dir, process, continues=_continues(log_dir, options.resume), overwrite=options.overwrite),
        RunLog(log_dir, process.rank, config, histograms=options.histograms, earlier=earlier) as log,
    ):
        state = start(
            task,
            process,
            log_dir,
            log,
            resume=options.resume,
            weights=options.weights,
            allow_world_size_change=options.allow_world_size_change,
        )
        epochs = config.optimizer.schedule.epochs
        if state.epoch >= epochs:
            log.message(f"all {epochs} epochs are done; {printable(log_dir)}: nothing to train")
        else:
            log.message(_begin_summary(state, num_parameters, loaders, data, log_dir))
            log.begin(state.step, process.device, process.world_size, images)
            train(state, *loaders, log, log_dir, log_interval=options.log_interval)
        log.message(_end_summary(state, data, log_dir))
    return state


def seed_configs(config: Experiment, log_dir: Path, seeds: Sequence[int]) -> dict[Path, Experiment]:
    """Return the settings with each seed, by the log folder of its run: ``log_dir``-seedN.

    Raises ConfigError for a seed that is not possible or is given twice.
    """
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"a seed is given twice ({listed(seeds)}); command line: give each seed once")
    settings = config.model_dump(mode="json")
    return {
        log_dir.with_name(f"{log_dir.name}-seed{seed}"): parse_experiment({**settings, "seed": seed}, f"seed {seed}")
        for seed in seeds
    }


def with_epochs(config: Experiment, epochs: int) -> Experiment:
    """Return the settings with another number of epochs; ConfigError if its schedule is impossible with them."""
    settings = config.model_dump(mode="json")
    settings["optimizer"]["schedule"]["epochs"] = epochs
    return parse_experiment(settings, f"--epochs {epochs}")


def train_seeds(
    config: Experiment,
    data: Place,
    log_dir: Path,
    process: Process,
    seeds: Sequence[int],
    options: TrainOptions | None = None,
    command: str = "",
) -> list[SeedRun]:
    """Train once with each seed, one after the other, and return the scores of their last validations.

    The run of seed N is that of `train_experiment` with the log folder ``log_dir``-seedN, and each is resumed as
    ``options`` say. After each run ``log_dir``-seeds.json is written, with mean and spread of the scores so far and
    the ``command``. A run whose loss is no longer finite has failed, and the next begins. Any other error would hit the
    other seeds too and is raised, as is the TrainingInterrupted of a signal.

    Every process of a run has to call it; all of them return the same.
    """
    options = options or TrainOptions()
    configs = seed_configs(config, log_dir, seeds)
    if options.resume is None and not options.overwrite:
        for folder in configs:  # all of them before the first is trained, which may take days
            process.on_main(partial(check_unused, folder))
    runs: list[SeedRun] = []
    for folder, seed_config in configs.items():
        last_epoch = seed_config.optimizer.schedule.epochs - 1
        try:
            train_experiment(seed_config, data, folder, process, options)
        except NonFiniteLossError as error:  # raised on every rank
            logger.error("seed %d has failed: %s", seed_config.seed, error)
            runs.append(SeedRun(seed_config.seed, str(folder), None, str(error)))
        else:
            scored = process.on_main(partial(validation_after, folder, last_epoch))
            scores = {name: float(scored[name]) for name in task_of(config).labels}
            runs.append(SeedRun(seed_config.seed, str(folder), scores))
        process.on_main(partial(_write_seeds, log_dir, runs, command, process))
    return runs


def _write_seeds(log_dir: Path, runs: Sequence[SeedRun], command: str, process: Process) -> None:
    content = {"command": command, "environment": describe_environment(process.device), **seeds_json(runs)}
    with writable(log_dir.parent):
        write_json(log_dir.with_name(f"{log_dir.name}-seeds.json"), content)


def _check_settings_agree(config: Experiment, process: Process, options: TrainOptions) -> None:
    check_same_on_all_ranks(
        process,
        lambda: {
            **environment_fingerprint(process, "train"),
            **config.model_dump(mode="json", exclude={"expected"}),
            "--on-bad-image": options.on_bad_image,
            "--print-freq": options.log_interval,
            "--allow-world-size-change": options.allow_world_size_change,
        },
        "give every process the same experiment, options and version of zoo",
    )


def _build_loaders(task: Task, data: Place, process: Process, options: TrainOptions) -> Loaders:
    """Return the loaders of the images to train on and to validate; DataError unless both have the same classes."""
    share: dict[str, Any] = {"rank": process.rank, "world_size": process.world_size, "workers": options.workers,
             "pin_memory": process.device.type == "cuda", "on_bad_image": options.on_bad_image}  # fmt: skip
    train_loader = task.build_train_loader(data, **share)
    val_loader = task.build_val_loader(data, task.own_protocol, **share)
    check_same_classes(train_loader.dataset, val_loader.dataset)
    return train_loader, val_loader


def _count_parameters(config: Experiment) -> int:
    """Return the number of parameters; ConfigError for a network that does not exist, or not for the images' sizes."""
    network, model = config.network, build_on_meta(config.network)
    if is_external(network.arch):
        sides = config.input.crop_train, config.input.crop_val
        check_logits(model.train(), network.arch, network.num_classes, sides[0], "input.crop_train")
        check_logits(model.eval(), network.arch, network.num_classes, sides[1], "input.crop_val")
    return sum(parameter.numel() for parameter in model.parameters())


def _continues(log_dir: Path, resume: str | None) -> bool:
    """Return whether ``resume`` continues the run that the log folder holds."""
    # Unlike Path.resolve, realpath accepts links that lead in a circle.
    return resume == AUTO or (
        resume is not None and os.path.dirname(os.path.realpath(resume)) == os.path.realpath(log_dir)
    )


def _begin_summary(state: TrainState, num_parameters: int, loaders: Loaders, data: Place, log_dir: Path) -> str:
    """Return what is about to be trained, on what and where, a line for each."""
    config, process = state.config, state.process
    network, optimizer = config.network, config.optimizer
    num_train, num_val = (loader.batch_sampler.num_images for loader in loaders)
    processes = f"{process.world_size} process{'es' * (process.world_size > 1)}"
    layers = "" if is_external(network.arch) else f", {network.norm} norms with {network.activation}"
    lines = [
        f"training {network.arch}: {num_parameters:,} parameters{layers}, {network.num_classes} classes",
        f"images      {num_train:,} to train on, {num_val:,} to validate on; {printable(data)}",
        f"schedule    {optimizer.schedule.epochs} epochs of {len(loaders[0])} steps, batch {optimizer.batch_size}",
        f"device      {process.device}, {processes}",
        f"log folder  {printable(log_dir)}",
    ]
    return "\n".join(lines)


def _end_summary(state: TrainState, data: Place, log_dir: Path) -> str:
    """Return the best score and, if the names can be printed as they are, the commands that a user may want next."""
    best, images = str(log_dir / BEST), str(data)
    after = "" if state.best_epoch is None else f" after epoch {state.best_epoch + 1}"
    label = next(iter(state.task.labels.values()))
    lines = [f"best {label} {state.best_score:.2f} %{after}; {printable(best)}"]
    if printable(best + images) == best + images:  # with escapes the commands would name files that do not exist
        commands = state.task.next_commands(shlex.quote(best), shlex.quote(images))
        lines += [f"{purpose:<11} {command}" for purpose, command in commands.items()]
    return "\n".join(lines)
