"""Chooses the experiment that `zoo.train` runs: the named experiment, or the default one of a network, with changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config.architectures import LEAN, architecture
from zoo.config.experiment import Experiment, Input
from zoo.config.network import ExternalSpec, Spec
from zoo.config.parse import load_experiment, parse_experiment, replace_settings
from zoo.config.published import published
from zoo.config.record import Preprocessing
from zoo.config.section import parse_section
from zoo.data.dataset import open_classes
from zoo.data.map_dataset import Datasets, MapDataset, class_names_of
from zoo.data.sources.location import DataPath
from zoo.data.transforms.classification import TrainTransform
from zoo.errors import ConfigError, DataError
from zoo.models.build import build_on_meta
from zoo.models.external import own_preprocessing
from zoo.registry.load_network import LoadedNetwork
from zoo.registry.open import INPUTS, find_network, only_variant
from zoo.remat._lean import is_lean
from zoo.weights import digests_of, read_weights

logger = logging.getLogger(__name__)

MODULE_ARCH = "module"  # a user's own network has the architecture "module:CLASS"
# The optimizer of a run without an experiment.
DEFAULT_OPTIMIZER = {
    "batch_size": 64,
    "learning_rate": 0.025,
    "nesterov": True,
    "schedule": {"type": "cosine", "mode": "step", "epochs": 30, "warmup_epochs": 0.5},
}


def default_experiment(
    network: nn.Module | Spec, data: DataPath | Datasets, settings: Mapping[str, Any] | None = None
) -> Experiment:
    """Return the experiment that trains a network on the classes of ``data``, by default with `DEFAULT_OPTIMIZER`.

    An architecture stands for the network that `get` returns. ``settings`` are sections of an experiment file; they
    replace the default sections. Raises ConfigError for an unknown architecture, for a module that returns no logits,
    and for a segmentation network without settings, because a folder does not specify the layout of its label maps.
    Raises DataError for data without classes.
    """
    if isinstance(network, nn.Module):
        sections = {"optimizer": DEFAULT_OPTIMIZER, **(settings or {})}
        name = type(network).__name__
        return parse_experiment({**sections, "network": _describe(network, data, sections)}, f"the recipe of {name}")
    images = INPUTS["imagenet"]
    if not isinstance(network, ExternalSpec):
        known = architecture(network.arch)
        if known.task == "segmentation" and settings is None:
            raise ConfigError(
                f"{network.arch} is a segmentation network, and a folder does not specify the layout of its label maps",
                remedy="write an experiment file, for example from the output of zoo show quickstart_scenes.json",
            )
        images = INPUTS[known.input]
    section = network.given()
    if "num_classes" not in section:
        section["num_classes"] = _count_classes(data)
    sections = {"optimizer": DEFAULT_OPTIMIZER, "input": images.model_dump(), **(settings or {})}
    return parse_experiment({**sections, "network": section}, f"the default recipe of {network.arch}")


def _count_classes(data: DataPath | Datasets) -> int:
    if not isinstance(data, Datasets):
        return len(open_classes(data / "train"))
    if names := class_names_of(data.train):
        return len(names)
    remedy = "set the number of classes of the network: zoo.train(zoo.get(NAME, num_classes=N), ...)"
    raise DataError("the data set names no classes (attribute classes)", data, remedy)


def _describe(module: nn.Module, data: DataPath | Datasets, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``network`` section of a module. It rebuilds the module if zoo or another package built it.

    Raises ConfigError unless the module returns logits.
    """
    settings = parse_section(Input, sections.get("input", {}), type(module).__name__, ("input",))
    shape: tuple[int, ...] = (3, settings.crop_train, settings.crop_train)
    if isinstance(data, Datasets):
        sample = MapDataset(data.train, TrainTransform(settings))[0, 0]
        shape, dtype = tuple(sample.drawn.pixels.shape), sample.drawn.pixels.dtype
        if dtype is torch.float64 and (own := next(module.parameters(), sample.drawn.pixels).dtype) is not dtype:
            what = f"its image is a tensor of {dtype}, and the parameters of the network are {own}"
            raise DataError(what, sample.path, f"convert the images to {own}")
    num_classes = _count_outputs(module, shape)
    spec: Spec | None = getattr(module, "built_as", None)
    if spec is not None and _shapes(build_on_meta(spec)) == _shapes(module):
        return spec.given()
    memory = {"memory": LEAN} if is_lean(module) else {}
    return {"arch": f"{MODULE_ARCH}:{type(module).__qualname__}", "num_classes": num_classes, **memory}


def _count_outputs(module: nn.Module, shape: Sequence[int]) -> int:
    """Return the number of logits for an image of this shape. Raises ConfigError for anything but logits."""
    modes = {each: each.training for each in module.modules()}
    parameter = next(module.parameters(), torch.empty(0))
    try:
        with torch.no_grad():
            output = module.eval()(torch.zeros(2, *shape, device=parameter.device, dtype=parameter.dtype))
    finally:
        for each, training in modes.items():
            each.training = training
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 2:
        found = f"the shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        what = f"it returns {found} for two images of shape {tuple(shape)}, not logits of shape (2, classes)"
        raise ConfigError(what, type(module).__name__, "wrap it in a module that returns logits alone")
    return output.shape[1]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in module.state_dict().items()}


def experiment_for(
    network: nn.Module | LoadedNetwork | Spec | Experiment | str | os.PathLike[str],
    data: DataPath | Datasets,
    epochs: int | None = None,
    batch_size: int | None = None,
    memory: str | None = None,
    settings: Experiment | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    replicas: int | None = None,
    replaced: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> Experiment:
    """Return the experiment of this name or path; for a network, the default experiment with ``settings``.

    The default experiment has as many classes as ``data``. For an architecture with ``weights``, it prepares images as
    for these weights, see `_images_of`. ``replaced`` are the ``settings`` of `zoo.train`, which documents the other
    arguments too. Raises ConfigError for an unknown name (with the nearest names), for two
    experiments, and for published weights without the settings of their training.
    """
    if isinstance(network, LoadedNetwork):
        network = network.experiment if settings is None else network.model
    elif isinstance(network, (str, os.PathLike)):
        network = open_experiment(network)
    if isinstance(network, Spec):
        if settings is None:
            logger.info(
                "%s with default settings; experiment.json in the log folder has all of them, and zoo train accepts an "
                "edited copy of that file",
                network.arch,
            )
        if (settings is None or isinstance(settings, Mapping)) and (images := _images_of(network, weights)):
            settings = {**images, **(settings or {})}
    if not isinstance(network, Experiment):
        if isinstance(settings, (str, os.PathLike)):
            settings = load_experiment(Path(settings))
        if isinstance(settings, Experiment):
            _check_recipe(settings)
            settings = settings.model_dump(mode="json", exclude={"network", "expected"})
        network = default_experiment(network, data, settings)
    elif settings is not None:
        what = "two experiments are given"
        raise ConfigError(what, "experiment", "give a network and an experiment, or an experiment alone")
    _check_recipe(network)
    return with_changes(network, epochs, batch_size, memory, replicas, replaced)


def with_pretrained(
    name: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None
) -> tuple[Experiment | Spec, str | None]:
    """Return the network or the experiment that a name stands for, and the name of published weights to start from.

    A network of another package gets an option for its weights, and no name of weights. A published variant fixes the
    layers of its architecture; a user's own experiment keeps its settings.

    Raises ConfigError for an unknown name and for ``weights``, which would be a second source, and WeightsError for a
    network without published weights, or with several.
    """
    if weights is not None:
        raise ConfigError("there are two sources of weights", name, "give one of pretrained and weights")
    opened, found = find_network(name), open_experiment(name)
    if isinstance(opened.spec, ExternalSpec):
        options = {**opened.spec.options, "pretrained": True}
        if isinstance(found, Experiment):
            return with_changes(found, replaced={"network.options": options}), None
        return opened.spec.changed(options=options), None
    if isinstance(found, Experiment) and opened.name not in published():
        return found, only_variant(found.network.arch)
    variant = only_variant(opened.name)
    of_variant = published()[variant].experiment.network.given()
    section = {key: value for key, value in of_variant.items() if key != "num_classes"}
    return parse_section(type(opened.spec), section, variant), variant


def _images_of(spec: Spec, weights: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a section ``input`` with the preprocessing that belongs to initial weights; empty if it is unknown.

    Files of zoo describe it, and packages describe it for their own weights. Training crops get the size of the
    validation crop.
    """
    is_pretrained = isinstance(spec, ExternalSpec) and spec.options.get("pretrained")
    if weights is None and not is_pretrained:
        return {}
    images: Preprocessing | None = None
    if weights is not None:
        known = published().get(os.fspath(weights))
        record = known.experiment.record() if known is not None else read_weights(weights).record
        images = None if record is None else record.preprocessing
    if images is None and isinstance(spec, ExternalSpec):
        images = own_preprocessing(spec.arch, digests_of(weights)["sha256"] if weights is not None else None)
    return {} if images is None else {"input": {**images.model_dump(), "crop_train": images.crop_val}}


def open_experiment(name: str | os.PathLike[str]) -> Experiment | Spec:
    """Return the experiment or the network that a name stands for. Raises ConfigError for a weights file."""
    opened = find_network(name)
    if opened.is_experiment and opened.experiment is not None:
        return opened.experiment
    if opened.weights is not None:
        what = "this is a weights file, not an experiment"
        raise ConfigError(what, opened.name, "name an experiment or an architecture, and give the file as --weights")
    return opened.spec


def _check_recipe(experiment: Experiment) -> None:
    if not experiment.has_recipe:
        arch = experiment.network.arch
        what = f"the published weights of {arch} come without the settings of their optimizer"
        raise ConfigError(what, "optimizer", f"add this section to a copy of the file, or train {arch}")


def with_changes(
    config: Experiment,
    epochs: int | None = None,
    batch_size: int | None = None,
    memory: str | None = None,
    replicas: int | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Experiment:
    """Return a copy of the settings with these epochs, batch size, memory strategy and replicas.

    ``replaced`` maps dotted keys to further values. Raises ConfigError if the values are invalid together.
    """
    options = {
        "optimizer.schedule.epochs": epochs,
        "optimizer.batch_size": batch_size,
        "optimizer.replicas": replicas,
        "network.memory": memory,
    }
    changes = {**(replaced or {}), **{key: value for key, value in options.items() if value is not None}}
    return parse_experiment(replace_settings(config.model_dump(mode="json"), changes), "the changed experiment")
