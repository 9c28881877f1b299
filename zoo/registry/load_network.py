"""Loads a network with its weights and the settings to score it: `load_network`.

Tested by tests/cli/test_validate.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from zoo.config.experiment import Experiment, Input
from zoo.config.network import ExternalSpec
from zoo.config.published import entry_of, published
from zoo.convert.transfer import load_transferred
from zoo.data.imagenet import imagenet_wnids
from zoo.errors import ConfigError, WeightsError, escape
from zoo.registry.get import build_from_config
from zoo.registry.names import Resolved, only_variant, resolve
from zoo.registry.preprocessing import preprocessing_of
from zoo.weights import StoredWeights, digests_of
from zoo.weights.cache import published_name


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
        """Return md5 and sha256 of the weights file; of published weights the published one, None for unknown ones."""
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

    If training kept a moving average of the weights, the network gets that average.

    Args:
    - `name`: an experiment file (.json), the name of a bundled experiment or published network, a weights file that
      describes its network, "hf-hub:OWNER/NAME", an architecture, or with ``weights`` a network of another package with
      1000 classes, such as "torchvision:resnet50".
    - `weights`: a weights file, the name of published weights, or "hf-hub:OWNER/NAME". Default: the weights in the file
      ``name``, or those published under the name; an architecture stands for its only published network.

    The weights are converted to the norms of the network if that is exact, and used with its activation. The log says
    so. Raises ConfigError for an unknown name, and WeightsError for weights that are missing, that do not fit
    (including the classifier), or that belong to another network.
    """
    found = resolve(name)
    if weights is not None or found.stored is None:
        found = found.with_weights(_published(found) if weights is None else weights)
    stored, experiment = found.stored, _experiment_of(found)
    assert stored is not None
    network = experiment.network.without_pretrained()
    model = build_from_config(network)
    report = load_transferred(model, stored, "the experiment" if found.is_experiment else "the checkpoint")
    if found.experiment is None:
        stored.warn_of_assumptions(found.network)
    if report.initial:
        raise WeightsError(
            f"the file has weights for the body only, and {' and '.join(report.initial)} would be random",
            stored.path,
            f"give weights of a whole {experiment.network.arch}; zoo train --weights can start from this file",
        )
    # Files of other packages do not specify which tensors belong to the classifier; all of them fit.
    if report.classifier != "loaded" and not (report.classifier == "none" and isinstance(network, ExternalSpec)):
        raise WeightsError(
            "the classifier of the file does not fit the network",
            stored.path,
            "give the experiment that the weights were trained with",
        )
    weights = stored.published or os.fspath(stored.path)
    return LoadedNetwork(escape(found.name), model, experiment, weights, _class_names(stored, experiment))


def as_loaded(
    network: LoadedNetwork | str | os.PathLike[str], weights: str | os.PathLike[str] | None = None
) -> LoadedNetwork:
    """Return a network of `load_network` unchanged, and load any other, see there.

    Raises ConfigError for ``weights`` beside a network that has its weights.
    """
    if not isinstance(network, LoadedNetwork):
        return load_network(network, weights)
    if weights is not None:
        what = f"weights = {escape(weights)}: {network.title} is loaded with its weights"
        raise ConfigError(what, remedy="give the name of the network and these weights, or the loaded network alone")
    return network


def _published(found: Resolved) -> str:
    """Return the name of the published weights of a network that was named without weights."""
    if found.experiment is None and not isinstance(found.network, ExternalSpec):
        return only_variant(found.name)
    if found.name not in published():
        raise WeightsError(
            f"there are no published weights of {escape(found.name)}", remedy="give weights to score, --weights FILE"
        )
    return found.name


def _experiment_of(found: Resolved) -> Experiment:
    """Return the settings that a network is scored with; defaults where neither name nor file has them."""
    if found.experiment is not None:
        return found.experiment
    images = preprocessing_of(found)
    return Experiment(network=found.network, input=Input(**images.model_dump()))


def _class_names(stored: StoredWeights, experiment: Experiment) -> Sequence[str] | None:
    """Return the class names in the weights file, or ImageNet's for published classifiers."""
    if stored.record is not None and stored.record.class_names is not None:
        return stored.record.class_names
    return imagenet_wnids() if stored.published and experiment.task == "classification" else None
