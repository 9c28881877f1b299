"""What a name stands for: `resolve` finds its network, its experiment and its weights. Imports no torch by itself.

Tested by tests/registry/test_get.py.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zoo.config.architectures import ARCHITECTURES, architecture, is_hub_name
from zoo.config.experiment import Experiment, Input
from zoo.config.network import ExternalSpec, Spec, spec_class
from zoo.config.parse import experiment_names, find_experiment, load_experiment
from zoo.config.published import published
from zoo.config.record import NetworkRecord
from zoo.errors import ConfigError, WeightsError, escape, join_names, nearest

if TYPE_CHECKING:
    from zoo.weights import StoredWeights

CIFAR_INPUT = Input(
    crop_train=32,
    scale_val=-1,
    crop_val=32,
    mean=[0.4914, 0.4822, 0.4465],
    std=[0.2471, 0.2435, 0.2616],
)
INPUTS = {"imagenet": Input(), "cifar": CIFAR_INPUT}  # for networks that belong to no experiment


@dataclass(frozen=True)
class Resolved:
    """What a name stands for.

    Args:
    - `name`: of the network, the experiment or the file.
    - `record`: the network; None if the name is a weights file that does not describe its network.
    - `experiment`: the settings that the network is trained with; None if the name has none.
    - `stored`: the content of the weights file, if it was read.
    - `is_experiment`: whether the name is the name or the file of an experiment.
    """

    name: str
    record: NetworkRecord | None
    experiment: Experiment | None = None
    stored: StoredWeights | None = None
    is_experiment: bool = False

    @property
    def described(self) -> NetworkRecord:
        """The network and its images. Raises WeightsError if the weights file does not describe it."""
        if self.record is None:
            remedy = "name the network or its experiment, and give the file as weights"
            raise WeightsError("the file does not describe its network", escape(self.name), remedy)
        return self.record

    @property
    def network(self) -> Spec:
        """The network. Raises WeightsError if the weights file does not describe it."""
        return self.described.spec

    def with_weights(self, weights: str | os.PathLike[str]) -> Resolved:
        """Return this network with the content of a weights file, or of published weights.

        The file's description of an architecture completes the name; without a description, an architecture gets the
        file's number of classes. Raises WeightsError if it is another network.
        """
        from zoo.weights import read_weights
        from zoo.weights.description import check_same_network
        from zoo.weights.load_file import count_classes

        stored = read_weights(weights)
        if self.experiment is not None:
            return replace(self, stored=stored)
        if stored.record is None:
            num_classes = count_classes(stored.state_dict, self.network, escape(stored.path))
            spec = self.network.changed(num_classes=num_classes) if num_classes else self.network
            return replace(self, record=self.described.with_spec(spec), stored=stored)
        check_same_network(stored.record.spec, {"arch": self.network.arch}, stored.path, "the name")
        return replace(self, record=stored.record, experiment=stored.experiment, stored=stored)


def resolve(name: str | os.PathLike[str]) -> Resolved:
    """Return what a name stands for.

    ``name`` is an architecture, "timm:NAME" or "torchvision:NAME", a published variant, a bundled experiment, the path
    of an experiment file (.json), the path of a weights file, or "hf-hub:OWNER/NAME". A weights file is read, published
    weights are not. Raises ConfigError for an unknown name, and WeightsError for a file that cannot be read.
    """
    name = os.fspath(name)
    found = _experiment_of(name) or _network_of(name) or _file_of(name)
    if found is None:
        raise _unknown(name)
    return found


def _experiment_of(name: str) -> Resolved | None:
    if name in ARCHITECTURES:
        return None
    if name in published():
        experiment = published()[name].experiment
    elif (file := find_experiment(name)) is not None:
        name, experiment = file.stem, load_experiment(file)
    else:
        return None
    return Resolved(name, experiment.record(), experiment, is_experiment=True)


def _network_of(name: str) -> Resolved | None:
    section = spec_class(name)
    is_network = name in ARCHITECTURES or section is ExternalSpec
    return Resolved(name, NetworkRecord(spec=section(arch=name))) if is_network else None


def _file_of(name: str) -> Resolved | None:
    if not os.path.isfile(name) and not is_hub_name(name):
        return None
    from zoo.weights import read_weights

    stored = read_weights(name)
    return Resolved(name, stored.record, stored.experiment, stored)


def list_models(pattern: str | Sequence[str] = "*", pretrained: bool = False) -> list[str]:
    """Return the names that match the shell-style ``pattern``, sorted: architectures and published variants.

    Several patterns give the names that match any of them. With ``pretrained`` only the published variants. Raises
    ConfigError for anything but text.
    """
    patterns = [pattern] if isinstance(pattern, str) else pattern
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"a pattern must be text, or a list of texts, got {pattern!r}")
    names = list(published()) if pretrained else [*ARCHITECTURES, *published()]
    matching = {name for each in patterns for name in fnmatch.filter(names, each)}
    return sorted(matching, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])


def list_pretrained(pattern: str | Sequence[str] = "*") -> list[str]:
    """Return the names of the published variants, as ``list_models(pattern, pretrained=True)`` does."""
    return list_models(pattern, pretrained=True)


def is_model(name: str) -> bool:
    """Return whether `list_models` has this name: an architecture or a published variant."""
    return name in ARCHITECTURES or name in published()


def only_variant(name: str) -> str:
    """Return ``name`` if it is a published variant, or the only published variant of the architecture ``name``.

    Raises WeightsError for another name, and for an architecture that has several.
    """
    if name in published():
        return name
    variants = [variant for variant, entry in published().items() if entry.arch == name]
    if not variants:
        raise WeightsError(f"{name} has no published weights; those that have: {', '.join(published())}")
    if len(variants) > 1:
        raise WeightsError(f"{name} has several published weights, name one of them: {', '.join(variants)}")
    return variants[0]


def record_of(name: str) -> NetworkRecord:
    """Return the record of an architecture or published variant; ConfigError for other names."""
    return with_preprocessing(resolve(name).described)


def with_preprocessing(record: NetworkRecord) -> NetworkRecord:
    """Return a record with the default preprocessing of its architecture, unless it has one or is external."""
    if isinstance(record.spec, ExternalSpec) or record.preprocessing is not None:
        return record
    images = INPUTS[architecture(record.spec.arch).input].preprocessing()
    return record.model_copy(update={"preprocessing": images})


def _unknown(name: str) -> ConfigError:
    """Return the error for a name that stands for nothing."""
    if os.sep in name or os.path.exists(name) or name.endswith((".pth", ".pt", ".tar", ".safetensors", ".json")):
        if os.path.isdir(name):
            return ConfigError("this is a folder", name, "give a file in it, such as model_best.pth.tar")
        remedy = "give the path of a file, or the name of a network or an experiment (zoo list shows all networks)"
        return ConfigError("there is no such file", name, remedy)
    names = [*ARCHITECTURES, *published(), *experiment_names()]
    what = f"there is no network, experiment or file called {escape(name)}"
    return ConfigError(what, remedy=_nearest_network(name, names))


def _nearest_network(name: str, names: Sequence[str]) -> str:
    """Return a remedy for an unknown name: networks of timm and torchvision, otherwise the nearest of ``names``."""
    from zoo.models.external import similar_names, squeezed

    is_own = any(squeezed(each).startswith(squeezed(name)) for each in names)
    if not is_own and (found := similar_names(name)):
        return f"other packages have {join_names(found)} (zoo list shows the networks of zoo)"
    return nearest(name, names, "zoo list shows all networks")
