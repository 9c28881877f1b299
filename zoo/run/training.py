"""Training of an experiment on a folder of images, from the settings to the checkpoints: `train`."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from zoo.architectures import ARCHITECTURES, architecture, is_external
from zoo.config import (
    Experiment,
    check_world_size,
    differences,
    experiment_names,
    find_experiment,
    load_experiment,
    parse_experiment,
)
from zoo.data.classes import check_same_classes
from zoo.data.folder import open_source
from zoo.data.loader import Loader
from zoo.data.location import DataPath, parse_data_path
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine import loop
from zoo.engine.checkpoint import BEST
from zoo.engine.consistency import check_same_on_all_ranks, dataset_fingerprint, environment_fingerprint, sizes_digest
from zoo.engine.process import Process, open_process
from zoo.engine.start import AUTO, start
from zoo.engine.state import TrainState
from zoo.engine.task import Task
from zoo.errors import ConfigError, DataError, NonFiniteLossError, escape, join_names, nearest
from zoo.files import write_json
from zoo.models.build import build_on_meta
from zoo.models.external import check_logits
from zoo.registry import INPUTS
from zoo.run.environment import describe_environment
from zoo.run.log_folder import check_log_dir, check_unused, log_folder, writable
from zoo.run.run_log import RunLog, buffered_records, read_validation
from zoo.run.seeds import SeedRun, seeds_json
from zoo.run.train_options import TrainOptions
from zoo.tasks import task_of

logger = logging.getLogger(__name__)


Loaders = tuple[Loader[TrainBatches], Loader[ValBatches]]


def train(
    experiment: Experiment | str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    log_dir: str | os.PathLike[str],
    epochs: int | None = None,
    process: Process | None = None,
    **options: Any,
) -> dict[str, float]:
    """Train on ``data``/train, validate on ``data``/val after each epoch, and return the scores of the last validation.

    Writes checkpoints, settings and logs to ``log_dir``. Under torchrun each process calls this function, and all of
    them get the same scores.

    >>> import zoo
    >>> scores = zoo.train("runs/mine/experiment.json", "data", log_dir="runs/mine", resume="auto")
    >>> print(sorted(scores))
    ['top1', 'top5']

    Args:
    - `experiment`: settings, the path of an experiment file, the name of a bundled experiment, or an architecture,
      which is trained with default settings and the number of classes of ``data``.
    - `data`: folder with train/ and val/ with a folder per class, or with shards, also by URL; for segmentation a
      folder as ``segmentation.layout`` says.
    - `log_dir`: folder of the run, which is created.
    - `epochs`: number of epochs instead of the experiment's; a resumed run with more epochs than before is extended.
    - `process`: this process, if `zoo.engine.process.open_process` is open already.
    - `options`: ``workers``, ``log_every``, ``on_bad_image``, ``resume``, ``weights``, ``overwrite``, ``log_hist`` and
      ``allow_world_size_change``; see `TrainOptions`.

    Raises TypeError for unknown options; ConfigError, DataError, WeightsError and CheckpointError for files and
    settings that do not fit; NonFiniteLossError; and TrainingInterrupted after a signal, once the state is saved.
    """
    train_options, folder = TrainOptions(**options), parse_data_path(data)
    if not isinstance(experiment, Experiment):
        experiment = experiment_for(os.fspath(experiment), folder, epochs)
    elif epochs is not None:
        experiment = with_epochs(experiment, epochs)
    with open_process() if process is None else nullcontext(process) as process:
        train_experiment(experiment, folder, Path(log_dir), process, train_options)
        return _last_scores(experiment, Path(log_dir), process)


def train_experiment(
    config: Experiment, data: DataPath, log_dir: Path, process: Process, options: TrainOptions | None = None
) -> TrainState:
    """Train on ``data``/train, validate on ``data``/val after each epoch, and return the state at the end.

    `zoo.engine.loop.train` calls `zoo.engine.step.train_step` for each step, which calls the network's forward. All
    processes of a run must call this function, inside `zoo.engine.process.open_process`. Checkpoints, settings and logs
    are written to ``log_dir``, once settings, images and network are verified to be the same on all processes. A
    resumed run is not trained further if all its epochs are done; with more epochs than its checkpoint it is extended,
    see `zoo.engine.start.restore`.

    Raises ConfigError, DataError, WeightsError and CheckpointError for files and settings that do not fit, and the
    errors of `zoo.engine.loop.train`.
    """
    options = options or TrainOptions()
    _check_settings_agree(config, process, options)
    check_world_size(config, process.world_size)
    process.on_main(lambda: check_log_dir(log_dir, data))
    task = task_of(config)
    with buffered_records() as earlier:
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
        RunLog(log_dir, process.rank, config, histograms=options.log_hist, earlier=earlier) as log,
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
            log.message(f"all {epochs} epochs are done; {escape(log_dir)}: nothing to train")
        else:
            log.message(_begin_summary(state, num_parameters, loaders, data, log_dir))
            log.begin(state.step, process.device, process.world_size, images)
            loop.train(state, *loaders, log, log_dir, log_interval=options.log_every)
        log.message(_end_summary(state, data, log_dir))
    return state


def seed_configs(config: Experiment, log_dir: Path, seeds: Sequence[int]) -> dict[Path, Experiment]:
    """Return the settings with each seed, by the log folder of its run: ``log_dir``-seedN.

    Raises ConfigError for an invalid or repeated seed.
    """
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"a seed is repeated ({join_names(seeds)})", "command line", "give each seed once")
    settings = config.model_dump(mode="json")
    return {
        log_dir.with_name(f"{log_dir.name}-seed{seed}"): parse_experiment({**settings, "seed": seed}, f"seed {seed}")
        for seed in seeds
    }


def default_experiment(arch: str, data: DataPath) -> Experiment:
    """Return the experiment that trains an architecture on the classes of ``data``/val.

    The network is the one that `get` returns. SGD with Nesterov momentum takes batches of 64 images; the rate rises to
    0.025 in half an epoch, and falls along a cosine to 0 after 30 epochs. Raises ConfigError for an unknown
    architecture, and for a segmentation network, because a folder does not specify the layout of its label maps;
    DataError for a folder without classes.
    """
    images = INPUTS["imagenet"]
    if not is_external(arch):
        known = architecture(arch)
        if known.task == "segmentation":
            raise ConfigError(
                f"{arch} is a segmentation network, and a folder does not specify the layout of its label maps",
                remedy="write an experiment file, for example from the output of zoo show quickstart_scenes.json",
            )
        images = INPUTS[known.input]
    network = {"arch": arch, "num_classes": len(open_source(data / "val").classes)}
    schedule = {"type": "cosine", "mode": "step", "epochs": 30, "warmup_epochs": 0.5}
    optimizer = {"batch_size": 64, "learning_rate": 0.025, "nesterov": True, "schedule": schedule}
    content = {"network": network, "optimizer": optimizer, "input": images.model_dump()}
    return parse_experiment(content, f"the default recipe of {arch}")


def experiment_for(name: str, data: DataPath, epochs: int | None = None) -> Experiment:
    """Return the experiment with this name or path; for an architecture, the default experiment, which is logged.

    The default experiment has the number of classes of ``data``. ``epochs`` replaces the number of epochs. Raises
    ConfigError, with the nearest names, for unknown names.
    """
    is_file = find_experiment(name) is not None or (Path(name).exists() and not Path(name).is_dir())
    if not is_file and name not in ARCHITECTURES and not is_external(name):
        raise ConfigError(
            f"there is no experiment, experiment file or architecture called {escape(name)}",
            remedy=f"the nearest experiments are {', '.join(nearest(name, experiment_names()))}, the nearest "
            f"architectures {', '.join(nearest(name, ARCHITECTURES))}",
        )
    config = load_experiment(name) if is_file else default_experiment(name, data)
    if epochs is not None:
        config = with_epochs(config, epochs)
    if is_file:
        return config
    settings = "".join(f"\n  {key} = {json.dumps(value)}" for key, value in differences(config).items())
    logger.info(
        "%s is an architecture, not an experiment, and is trained with default settings. experiment.json in the log "
        "folder will hold all of them; zoo train accepts an edited copy of that file. Settings that differ from the "
        "defaults of experiment files:%s",
        name, settings,
    )  # fmt: skip
    return config


def with_epochs(config: Experiment, epochs: int) -> Experiment:
    """Return the settings with another number of epochs. Raises ConfigError if the schedule does not allow it."""
    settings = config.model_dump(mode="json")
    settings["optimizer"]["schedule"]["epochs"] = epochs
    return parse_experiment(settings, f"{epochs} epochs")


def train_seeds(
    config: Experiment,
    data: DataPath,
    log_dir: Path,
    process: Process,
    seeds: Sequence[int],
    options: TrainOptions | None = None,
    command: str = "",
) -> list[SeedRun]:
    """Train once with each seed, one after the other, and return the scores of their last validations.

    The run with seed N is `train_experiment` with the log folder ``log_dir``-seedN and the same ``options``. After each
    run, mean and spread of the scores so far and the ``command`` are written to ``log_dir``-seeds.json. If the loss of
    a run is not finite, that run has failed and the next one starts. Other errors are raised, because they would affect
    the other seeds too.

    All processes of a run must call this function; all of them return the same.
    """
    options = options or TrainOptions()
    configs = seed_configs(config, log_dir, seeds)
    if options.resume is None and not options.overwrite:
        for folder in configs:  # all folders before the first run, which may take days
            process.on_main(partial(check_unused, folder))
    runs: list[SeedRun] = []
    for folder, seed_config in configs.items():
        try:
            train_experiment(seed_config, data, folder, process, options)
        except NonFiniteLossError as error:  # raised on every rank
            logger.error("seed %d has failed: %s", seed_config.seed, error)
            runs.append(SeedRun(seed_config.seed, str(folder), None, str(error)))
        else:
            runs.append(SeedRun(seed_config.seed, str(folder), _last_scores(seed_config, folder, process)))
        process.on_main(partial(_write_seeds, log_dir, runs, command, process))
    return runs


def _last_scores(config: Experiment, log_dir: Path, process: Process) -> dict[str, float]:
    """Return the scores of the validation after the last epoch, by name."""
    last_epoch = config.optimizer.schedule.epochs - 1
    scored = process.on_main(partial(read_validation, log_dir, last_epoch))
    return {name: float(scored[name]) for name in task_of(config).labels}


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
            "--log-every": options.log_every,
            "--allow-world-size-change": options.allow_world_size_change,
        },
        "give every process the same experiment, options and version of zoo",
    )


def _build_loaders(task: Task, data: DataPath, process: Process, options: TrainOptions) -> Loaders:
    """Return the loaders for training and validation. Raises DataError unless both have the same classes."""
    share: dict[str, Any] = {"rank": process.rank, "world_size": process.world_size, "workers": options.workers,
             "pin_memory": process.device.type == "cuda", "on_bad_image": options.on_bad_image}  # fmt: skip
    train_loader = task.build_train_loader(data, **share)
    val_loader = task.build_val_loader(data, task.own_protocol, **share)
    check_same_classes(train_loader.dataset, val_loader.dataset)
    return train_loader, val_loader


def _count_parameters(config: Experiment) -> int:
    """Return the number of parameters. Raises ConfigError for unknown networks and impossible image sizes."""
    network, model = config.network, build_on_meta(config.network)
    if is_external(network.arch):
        setting = "input.sizes_train" if config.input.sizes_train else "input.crop_train"
        for side in config.input.all_crops:
            check_logits(model.train(), network.arch, network.num_classes, side, setting)
        check_logits(model.eval(), network.arch, network.num_classes, config.input.crop_val, "input.crop_val")
    return sum(parameter.numel() for parameter in model.parameters())


def _continues(log_dir: Path, resume: str | None) -> bool:
    """Return whether ``resume`` continues the run in the log folder."""
    # Unlike Path.resolve, realpath accepts cyclic links.
    return resume == AUTO or (
        resume is not None and os.path.dirname(os.path.realpath(resume)) == os.path.realpath(log_dir)
    )


def _begin_summary(state: TrainState, num_parameters: int, loaders: Loaders, data: DataPath, log_dir: Path) -> str:
    """Return a description of network, images, schedule, device and log folder, one per line."""
    config, process = state.config, state.process
    network, optimizer = config.network, config.optimizer
    num_train, num_val = (loader.batch_sampler.num_images for loader in loaders)
    processes = f"{process.world_size} process{'es' * (process.world_size > 1)}"
    layers = "" if is_external(network.arch) else f", {network.norm} norms with {network.activation}"
    lines = [
        f"training {network.arch}: {num_parameters:,} parameters{layers}, {network.num_classes} classes",
        f"images      {num_train:,} to train on, {num_val:,} to validate on; {escape(data)}",
        f"schedule    {optimizer.schedule.epochs} epochs of {len(loaders[0])} steps, batch {optimizer.batch_size}",
        f"device      {process.device}, {processes}",
        f"log folder  {escape(log_dir)}",
    ]
    return "\n".join(lines)


def _end_summary(state: TrainState, data: DataPath, log_dir: Path) -> str:
    """Return the best score, and the commands to run next if their paths need no escapes."""
    best, images = str(log_dir / BEST), str(data)
    after = "" if state.best_epoch is None else f" after epoch {state.best_epoch + 1}"
    label = next(iter(state.task.labels.values()))
    lines = [f"best {label} {state.best_score:.2f} %{after}; {escape(best)}"]
    if escape(best + images) == best + images:  # escaped paths would not exist
        commands = state.task.next_commands(shlex.quote(best), shlex.quote(images))
        lines += [f"{purpose:<11} {command}" for purpose, command in commands.items()]
    return "\n".join(lines)
