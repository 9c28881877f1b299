"""Trains an experiment, from the settings to the checkpoints: `train`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.utils.data import Dataset

from zoo.config.architectures import ARCHITECTURES, LEAN
from zoo.config.experiment import Experiment, check_world_size
from zoo.config.network import ExternalSpec, NetworkSpec, Spec
from zoo.config.setting_hints import hint_for
from zoo.data.classes import check_num_classes, check_same_classes
from zoo.data.loader import Loader, LoaderOptions
from zoo.data.map_dataset import Datasets
from zoo.data.named import open_data
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.sources.location import DataPath, parse_data_path
from zoo.data.transforms.classification import KEEP_SCALE
from zoo.engine._checkpoint import BEST, CHECKPOINT
from zoo.engine._consistency import check_same_on_all_ranks, environment_fingerprint, fingerprints
from zoo.engine._observers import Callback, Callbacks, build_observers
from zoo.engine._process import Process, open_process
from zoo.engine._replicas import SynchronizedReplicas, fix_algorithms
from zoo.engine._start import AUTO, check_images, start
from zoo.engine._state import TrainState
from zoo.engine._task import Task
from zoo.engine._trainer import Trainer
from zoo.errors import ConfigError, DataError, escape
from zoo.models.build import build_on_meta
from zoo.models.external import check_logits
from zoo.registry.experiments import experiment_for, with_pretrained
from zoo.registry.get import build_from_config
from zoo.registry.load_network import LoadedNetwork
from zoo.remat._lean import is_lean, lean
from zoo.run.console import console, environment_rank
from zoo.run.log_folder import log_folder
from zoo.run.run_log import Histograms, RunLog, histogram_parameters, read_validation
from zoo.tables import counted
from zoo.tasks import task_of

logger = logging.getLogger(__name__)


Loaders = tuple[Loader[TrainBatches], Loader[ValBatches] | None]


@dataclass(frozen=True)
class TrainingResult:
    """The network of a finished run, its scores and its files.

    A run that resumes a checkpoint of the original trainer and never exceeds its best score has no scores.

    Args:
    - `model`: the network that was validated last: the trained network, or the moving average of its weights; in
      evaluation mode, on the device of the run.
    - `scores`: scores of the last validation by name, percent; empty without validation.
    - `best_score`: the best top-1 accuracy, or mIoU of a segmentation, percent; None without validation.
    - `best_epoch`: its epoch, from 0; None without validation.
    - `checkpoint`: the last checkpoint, to resume from.
    - `best_weights`: the weights with the best score; None without validation. `zoo.load_weights` loads them.
    """

    model: nn.Module
    scores: Mapping[str, float]
    best_score: float | None
    best_epoch: int | None
    checkpoint: Path
    best_weights: Path | None


def train(
    network: nn.Module | LoadedNetwork | Spec | Experiment | str | os.PathLike[str],
    data: Dataset[Any] | str | os.PathLike[str],
    val: Dataset[Any] | None = None,
    *,
    log_dir: str | os.PathLike[str],
    experiment: Experiment | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    replicas: int | None = None,
    memory: str | None = None,
    process: Process | None = None,
    workers: int = 0,
    log_every: int = 10,
    resume: str | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    log_hist: bool = False,
    callbacks: Sequence[Callback] = (),
    verbose: bool = True,
    **unknown: NoReturn,
) -> TrainingResult:
    """Train a network on a data set or a folder, and return it with its scores.

    Writes checkpoints, settings and logs to ``log_dir``, and validates after each epoch. Shows progress, scores and
    warnings as ``zoo train`` does, on stderr or in a notebook. Under torchrun each process calls this function and gets
    the same result.

    >>> import zoo
    >>> result = zoo.train("runs/mine/experiment.json", "data", log_dir="runs/mine", resume="auto")
    >>> print(sorted(result.scores), result.best_weights)
    ['top1', 'top5'] runs/mine/model_best.pth.tar

    Args:
    - `network`: a module that returns logits (N, classes), which is trained in place; the result of
      `zoo.load_network`, whose model is trained in place, by its own experiment; a spec; the name of an
      architecture; or an experiment: its settings, its name or the path of its file.
    - `data`: folder with train/ and val/ with a folder per class, or with shards, also by URL; for segmentation a
      folder as ``segmentation.layout`` says. Or the name of a data set, "torchvision:NAME" or "hf:NAME"; or a map-style
      data set of (image, label) or {"image", "label"}: floating-point tensors are inputs of the network, and other
      images are transformed as the section ``input`` says; see `MapDataset`.
    - `val`: data set to validate on, like ``data``; without it, a run on a data set has no validation.
    - `log_dir`: folder of the run, which is created.
    - `experiment`: settings, unless ``network`` is an experiment: an experiment, whose network is replaced, or sections
      of an experiment file, which replace the default ones. The default is `DEFAULT_OPTIMIZER`: SGD with
      Nesterov momentum takes batches of 64 images; the rate rises to 0.025 in half an epoch, and falls along a cosine
      to 0 after 30 epochs.
    - `settings`: single settings instead of the experiment's, by dotted keys: ``{"optimizer.learning_rate": 0.1}``.
    - `epochs`: number of epochs instead of the experiment's; a resumed run with more epochs than before is extended.
    - `batch_size`: images per step, over all processes, instead of the experiment's.
    - `replicas`: ``optimizer.replicas`` instead of the experiment's: up to so many processes train bit-identical
      weights.
    - `memory`: ``network.memory`` instead of the experiment's, such as "lean"; a module can only become "lean".
    - `process`: this process, if `zoo.engine._process.open_process` is open already.
    - `workers`: worker processes that read images, per process of the run; 0 reads them in the process itself.
    - `log_every`: batches between two log lines.
    - `resume`: checkpoint to continue from; "auto" takes the newest good one of the log folder, if there is one.
    - `weights`: weights file to start from instead of random weights, as `zoo.load_weights` reads it, or the name of
      published weights. The default experiment of an architecture prepares images as for these weights.
    - `pretrained`: start from the published weights of the name ``network``; for "torchvision:NAME" and "timm:NAME",
      from the weights of the package, which downloads them. A classifier for other classes is new.
    - `log_hist`: write histograms of the classifier and the last norm to TensorBoard every 10 steps.
    - `callbacks`: functions that rank 0 calls after each epoch with a dict of its metrics, such as ``wandb.log``; see
      `zoo.engine._observers.Callbacks`.
    - `verbose`: whether to show progress and warnings; the log files contain them in any case.

    Raises TypeError for an unknown argument; ConfigError, DataError, WeightsError and CheckpointError for files, data
    and settings that do not fit; NonFiniteLossError; and TrainingInterrupted after a signal, once the state is saved.
    """
    for name in unknown:
        arguments = [each for each in signature(train).parameters if each != "unknown"]
        hint = hint_for(name, arguments, "", lambda key: f'settings={{"{key}": ...}}')
        raise TypeError(f"train() got an unexpected keyword argument {name!r}{hint and f'; {hint}'}")
    with console(environment_rank() if process is None else process.rank, verbose):
        if not isinstance(data, (str, os.PathLike)):
            images: DataPath | Datasets = Datasets(data, val)
        elif val is None:
            images = open_data(parse_data_path(data))
        else:
            raise DataError("val is given, but a folder or a named data set has its own images to validate on", data)
        built = network.model if isinstance(network, LoadedNetwork) else network
        module = built if isinstance(built, nn.Module) else None
        if module is not None and memory not in (None, LEAN):
            what = f"memory = {memory!r}: a network that is built already can only become {LEAN!r}"
            raise ConfigError(what, type(module).__name__, "build it with this strategy, zoo.get(NAME, memory=...)")
        if pretrained:
            if not isinstance(network, (str, os.PathLike)):
                what = "pretrained: the network is built already, and the weights belong to a name"
                raise ConfigError(what, type(network).__name__, "build it with zoo.get(NAME, pretrained=True, ...)")
            network, weights = with_pretrained(network, weights)
        changes: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "memory": memory, "replicas": replicas}
        config = experiment_for(network, images, settings=experiment, replaced=settings, weights=weights, **changes)
        with open_process() if process is None else nullcontext(process) as process:
            state = train_experiment(
                config, images, Path(log_dir), process,
                workers=workers, log_every=log_every, resume=resume, weights=weights, module=module,
                log_hist=log_hist, callbacks=callbacks,
            )  # fmt: skip
            return _result(state, Path(log_dir))


def train_experiment(
    config: Experiment,
    data: DataPath | Datasets,
    log_dir: Path,
    process: Process,
    *,
    workers: int,
    log_every: int,
    resume: str | None,
    weights: str | None,
    module: nn.Module | None = None,
    log_hist: bool = False,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Train on ``data``/train, validate on ``data``/val after each epoch, and return the state at the end.

    ``module`` is the network to train, if it is built already; by default the network of the settings. The other
    arguments: see `train`.

    `zoo.engine._trainer.Trainer` calls `zoo.engine._step.train_step` for each step, which calls the network's forward.
    All processes of a run must call this function, inside `zoo.engine._process.open_process`. Checkpoints, settings and
    logs are written to ``log_dir``, once settings, images and network are verified to be the same on all processes. A
    resumed run is not trained further if all its epochs are done; with more epochs than its checkpoint it is extended,
    see `zoo.engine._start.restore`.

    Raises ConfigError, DataError, WeightsError and CheckpointError for files and settings that do not fit, and the
    errors of `zoo.engine._trainer.Trainer.train`.
    """
    # 1. Processes have the same settings and divide the batches.
    _check_settings_agree(config, process, log_every, len(callbacks))
    check_world_size(config, process.world_size)

    # 2. Processes have the same images.
    task = task_of(config)
    loaders = build_loaders(task, data, process.loader_options(workers, config.optimizer.replicas))
    _check_validates(config, loaders)
    process.on_main(lambda: _check_crop(config, loaders[1]))
    images = fingerprints(*loaders)
    check_same_on_all_ranks(process, lambda: images, _remedy_for_other_images(data), DataError)

    # 3. The network and its optimizer, new or from a checkpoint.
    num_parameters = _count_parameters(config) if module is None else _size(module)
    build = build_from_config if module is None else partial(_lean_if_requested, module)
    with (
        nullcontext() if config.optimizer.replicas is None else fix_algorithms(),
        log_folder(log_dir, process, continues=_continues(log_dir, resume)),
        RunLog(log_dir, process.rank, config) as log,
    ):
        state = start(task, process, log_dir, resume=resume, weights=weights, build=build)
        if not state.images:  # a new run, or a checkpoint of the original trainer, which counts only epochs
            state.step = state.epoch * len(loaders[0].batch_sampler)
        check_images(state, loaders[0].dataset, images)

        observers = build_observers(state, *loaders, log)
        if callbacks:
            observers.append(Callbacks(callbacks))
        if log_hist:
            observers.append(Histograms(log))
            if not histogram_parameters(state.model):
                logger.warning(
                    "--log-hist writes no histograms: %s has no known classifier or last norm", config.network.arch
                )

        # 4. The loop.
        if state.is_done:
            epochs = counted(config.optimizer.schedule.epochs, "epoch")
            logger.info("%d of %s done; %s: nothing to train", state.epoch, epochs, escape(log_dir))
        else:
            logger.info("%s", _begin_summary(state, num_parameters, loaders, data, log_dir))
            log.begin(state.step, process.device, process.world_size, images)
            Trainer(state, *loaders, log, log_dir, observers=observers, log_interval=log_every).train()
        logger.info("%s", _end_summary(state, log_dir))
        if not isinstance(data, Datasets):  # repeats the warning about missing classes, which has scrolled away
            check_num_classes(loaders[0].dataset, config.network.num_classes)
    return state


def _result(state: TrainState, log_dir: Path) -> TrainingResult:
    validates = state.best_epoch is not None
    return TrainingResult(
        model=state.scored_model.eval(),
        scores=_last_scores(state, log_dir) if validates else {},
        best_score=state.best_score if validates else None,
        best_epoch=state.best_epoch,
        checkpoint=log_dir / CHECKPOINT,
        best_weights=log_dir / BEST if validates else None,
    )


def _lean_if_requested(module: nn.Module, network: Spec) -> nn.Module:
    """Return ``module``, lean if the settings request it."""
    return lean(module) if network.memory == LEAN and not is_lean(module) else module


def _last_scores(state: TrainState, log_dir: Path) -> dict[str, float]:
    """Return the scores of the validation after the last epoch, by name."""
    scored = state.process.on_main(partial(read_validation, log_dir, state.epoch - 1))
    return {name: float(scored[name]) for name in state.task.labels}


def _check_validates(config: Experiment, loaders: Loaders) -> None:
    """Raise ConfigError for settings that need a validation, in a run without one."""
    needs = {
        "optimizer.schedule.patience": config.optimizer.schedule.patience,
        "checkpoint.keep_best": config.checkpoint.keep_best if config.checkpoint.keep_best > 1 else None,
    }
    for key, value in needs.items():
        if value is not None and loaders[1] is None:
            what = "needs validation scores, but the run has no images to validate on"
            raise ConfigError(what, f"{key} = {value}", "give a data set val, or remove the key")


def _check_crop(config: Experiment, loader: Loader[ValBatches] | None) -> None:
    """Raise DataError before the first epoch if the first validation image is smaller than its crop."""
    if loader is not None and config.task == "classification" and config.input.scale_val == KEEP_SCALE:
        loader.dataset[0, 0]


def _check_settings_agree(config: Experiment, process: Process, log_every: int, num_callbacks: int) -> None:
    check_same_on_all_ranks(
        process,
        lambda: {
            **environment_fingerprint(process, "train"),
            **config.model_dump(mode="json", exclude={"expected"}),
            "--log-every": log_every,
            "callbacks": num_callbacks,
        },
        "give every process the same experiment, options and version of zoo",
    )


def build_loaders(task: Task, data: DataPath | Datasets, options: LoaderOptions) -> Loaders:
    """Return the loaders for training and validation. Raises DataError unless both have the same classes."""
    train_loader = task.build_train_loader(data, options)
    if isinstance(data, Datasets) and data.val is None:
        return train_loader, None
    val_loader = task.build_val_loader(data, task.own_protocol, options)
    if not isinstance(data, Datasets):
        check_same_classes(train_loader.dataset, val_loader.dataset)
    return train_loader, val_loader


def _remedy_for_other_images(data: DataPath | Datasets) -> str:
    """Return how to give all ranks the same images, for messages."""
    if not isinstance(data, Datasets):
        return "copy the same DATA to every machine"
    return (
        "give every process the same data sets, and random_split a generator with a seed: "
        "generator=torch.Generator().manual_seed(0)"
    )


def _count_parameters(config: Experiment) -> int:
    """Return the number of parameters. Raises ConfigError for unknown networks and impossible image sizes."""
    network, model = config.network, build_on_meta(config.network)
    if isinstance(network, ExternalSpec):
        check_logits(model.train(), network.arch, network.num_classes, config.input.crop_train, "input.crop_train")
        check_logits(model.eval(), network.arch, network.num_classes, config.input.crop_val, "input.crop_val")
    return _size(model)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _continues(log_dir: Path, resume: str | None) -> bool:
    """Return whether ``resume`` continues the run in the log folder."""
    # Unlike Path.resolve, realpath accepts cyclic links.
    return resume == AUTO or (
        resume is not None and os.path.dirname(os.path.realpath(resume)) == os.path.realpath(log_dir)
    )


def _begin_summary(
    state: TrainState, num_parameters: int, loaders: Loaders, data: DataPath | Datasets, log_dir: Path
) -> str:
    """Return a description of network, images, schedule, device and log folder, one per line."""
    config, process = state.config, state.process
    network, optimizer = config.network, config.optimizer
    num_train, num_val = (0 if loader is None else loader.batch_sampler.num_images for loader in loaders)
    divided = f"{process.world_size} process{'es' * (process.world_size > 1)}"
    gpus, replicas = config.expected.gpus if config.expected is not None else None, optimizer.replicas
    if replicas is not None:
        divided += f", {counted(replicas, 'replica')}"
    if gpus not in (None, replicas or process.world_size):
        divided += f"; the authors had {counted(gpus, 'GPU')}: --replicas {gpus} has their batch statistics"
    layers = ""
    if isinstance(network, NetworkSpec) and network.arch in ARCHITECTURES:
        layers = f", {network.norm} norms with {network.activation}"
    lines = [
        f"training {network.arch}: {num_parameters:,} parameters{layers}, {network.num_classes} classes",
        f"images      {num_train:,} to train on, {num_val:,} to validate on; {escape(data)}",
        f"schedule    {counted(optimizer.schedule.epochs, 'epoch')} of {counted(len(loaders[0]), 'step')}, "
        f"batch {optimizer.batch_size}",
        f"device      {process.device}, {divided}",
        f"log folder  {escape(log_dir)}",
    ]
    if isinstance(state.replicas, SynchronizedReplicas):
        num_images = len(state.replicas.own) * -(
            -optimizer.batch_size // state.replicas.count // optimizer.accumulate_steps
        )
        lines.insert(
            -1, f"memory      of {counted(num_images, 'image')} at a time: norms are synchronized over replicas"
        )
    return "\n".join(lines)


def _end_summary(state: TrainState, log_dir: Path) -> str:
    """Return the best score and its checkpoint, or the last checkpoint of a run without validation."""
    early = ""
    if state.is_stale and state.epoch < state.config.optimizer.schedule.epochs:
        patience = counted(state.config.optimizer.schedule.patience or 0, "epoch")
        early = f"stopped after epoch {state.epoch}, {patience} without a better score\n"
    if state.best_epoch is None:
        return f"done; {escape(log_dir / CHECKPOINT)}"
    label = next(iter(state.task.labels.values()))
    best = escape(log_dir / BEST)
    return f"{early}best {label} {state.best_score:.2f} % after epoch {state.best_epoch + 1}; {best}"
