"""`load_network`: loads a network with its weights and the settings to score it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from zoo.config.experiment import Experiment, Input
from zoo.config.network import ExternalSpec
from zoo.config.published import entry_of
from zoo.convert._transfer import load_transferred
from zoo.data.imagenet import imagenet_wnids
from zoo.errors import ConfigError, WeightsError, escape
from zoo.registry.get import build_from_config
from zoo.registry.open import open_network
from zoo.registry.preprocessing import preprocessing_of
from zoo.weights import digests_of
from zoo.weights._cache import published_name
from zoo.weights._load_file import count_classes


@dataclass(frozen=True)
class LoadedNetwork:
    """A network with its weights and the settings to score it.

    Args:
    - `title`: name of the network in tables.
    - `model`: the network, (N, 3, h, w) -> logits (N, classes), or (N, classes, h, w) for segmentation.
    - `experiment`: settings that the weights were trained with; defaults for a bare architecture.
    - `weights`: file or published name of the weights; None for weights of another package.
    - `class_names`: names of the outputs in order, escaped by `escape`; None if unknown.
    """

    title: str
    model: nn.Module
    experiment: Experiment
    weights: str | Path | None = None
    class_names: Sequence[str] | None = None

    def digests(self) -> tuple[str | None, str | None]:
        """MD5 and SHA-256 of the weights file; for published weights the published digest. None where unknown."""
        if self.weights is None:
            return None, None
        name = published_name(self.weights)  # reading published weights verifies their digest
        if name is not None:
            known = dict([entry_of(name).digest])
            return known.get("md5"), known.get("sha256")
        digests = digests_of(self.weights)
        return digests["md5"], digests["sha256"]


def load_network(name: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> LoadedNetwork:
    """Return a network with weights, ready for `zoo.score`.

    If training maintained a moving average of the weights, the average is loaded.

    Args:
    - `name`: an experiment file (.json), the name of a bundled experiment or published network, a weights file that
      describes its network, "hf-hub:OWNER/NAME", an architecture, or with ``weights`` a network of another package with
      1000 classes, such as "torchvision:resnet50".
    - `weights`: a weights file, the name of published weights, or "hf-hub:OWNER/NAME". Default: the weights in the file
      ``name``, or the weights published under the name; an architecture stands for its only published network.

      The weights are converted to the norms of the network if the conversion is exact, and used with the network's
      activation; both are logged. Raises ConfigError for an unknown name. Raises WeightsError for weights that are
      missing, that do not fit (including the classifier), or that belong to another network.
    """
    opened = open_network(name, {}, weights=weights, for_weights=True)
    stored, spec = opened.weights, opened.spec
    assert stored is not None
    if stored.record is None and opened.experiment is None:
        num_classes = count_classes(stored.state_dict, spec, stored.source)
        spec = spec.changed(num_classes=num_classes) if num_classes else spec
    experiment = opened.experiment or Experiment(network=spec, input=Input(**preprocessing_of(opened).model_dump()))
    model = build_from_config(spec)
    report = load_transferred(model, stored, "the experiment" if opened.is_experiment else "the checkpoint")
    if opened.experiment is None:
        stored.warn_of_assumptions(spec)
    if report.initial:
        raise WeightsError(
            f"the file has weights for the body only, and {' and '.join(report.initial)} would be random",
            stored.path,
            f"give weights of a whole {spec.arch}; zoo train --weights can start from this file",
        )
    # Files of other packages do not mark the tensors of the classifier, so every tensor must fit.
    if report.classifier != "loaded" and not (report.classifier == "none" and isinstance(spec, ExternalSpec)):
        raise WeightsError(
            "the classifier of the file does not fit the network",
            stored.path,
            "give the experiment that the weights were trained with",
        )
    class_names: Sequence[str] | None = opened.network.class_names
    if class_names is None and stored.published and experiment.task == "classification":
        class_names = imagenet_wnids()
    return LoadedNetwork(escape(opened.name), model, experiment, stored.published or stored.path, class_names)


def as_loaded(
    network: LoadedNetwork | str | os.PathLike[str], weights: str | os.PathLike[str] | None = None
) -> LoadedNetwork:
    """Return a `LoadedNetwork` unchanged; load anything else with `load_network`.

    Raises ConfigError if ``weights`` are given for a network that is already loaded.
    """
    if not isinstance(network, LoadedNetwork):
        return load_network(network, weights)
    if weights is not None:
        what = f"weights = {escape(weights)}: {network.title} is loaded with its weights"
        raise ConfigError(what, remedy="give the name of the network and these weights, or the loaded network alone")
    return network
