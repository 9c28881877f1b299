"""`open_network` resolves a name to its network, weights and experiment. Does not import torch by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.config.architectures import ARCHITECTURES, is_hub_name
from zoo.config.experiment import Experiment, Input
from zoo.config.network import ExternalSpec, Spec, merge, spec_class
from zoo.config.parse import experiment_names, find_experiment, load_experiment
from zoo.config.published import published
from zoo.config.record import NetworkRecord, Preprocessing
from zoo.config.section import parse_section
from zoo.errors import ConfigError, WeightsError, escape, join_names, nearest
from zoo.registry.arguments import changes_of

if TYPE_CHECKING:
    from zoo.weights import StoredWeights

CIFAR_INPUT = Input(
    crop_train=32,
    scale_val=-1,
    crop_val=32,
    mean=[0.4914, 0.4822, 0.4465],
    std=[0.2471, 0.2435, 0.2616],
)
INPUTS = {"imagenet": Input(), "cifar": CIFAR_INPUT}  # defaults for networks without an experiment


@dataclass(frozen=True)
class Opened:
    """What a name stands for.

    Args:
    - `name`: name of the network, the experiment or the file.
    - `record`: the network and its images; None if the name is a weights file that does not describe its network.
    - `weights`: content of the weights file; None without weights, and for published weights that were not read.
    - `experiment`: the settings that train the network; None if there are none.
    - `is_experiment`: whether the name is the name or the file of an experiment.
    """

    name: str
    record: NetworkRecord | None
    weights: StoredWeights | None = None
    experiment: Experiment | None = None
    is_experiment: bool = False

    @property
    def network(self) -> NetworkRecord:
        """The network and its images. Raises WeightsError if the weights file does not describe them."""
        if self.record is None:
            remedy = "name the network or its experiment, and give the file as weights"
            raise WeightsError("the file does not describe its network", escape(self.name), remedy)
        return self.record

    @property
    def spec(self) -> Spec:
        """The network. Raises WeightsError if the weights file does not describe it."""
        return self.network.spec

    @property
    def source(self) -> str | None:
        """The address of published weights, or the path of the weights file; None without weights."""
        if self.name in published():
            return published()[self.name].page
        return None if self.weights is None else os.fspath(self.weights.path)


def find_network(name: str | os.PathLike[str]) -> Opened:
    """Find the network of a name, without reading published weights.

    ``name`` is an architecture, "timm:NAME" or "torchvision:NAME", a published variant, a bundled experiment, the path
    of an experiment file (.json), the path of a weights file, which is read, or "hf-hub:OWNER/NAME". Raises ConfigError
    for an unknown name, and WeightsError for a file that cannot be read.
    """
    name = os.fspath(name)
    found = _find_experiment(name) or _find_architecture(name) or _find_file(name)
    if found is None:
        raise _unknown(name)
    return found


def open_network(
    name: str | os.PathLike[str],
    changes: Mapping[str, Any],
    *,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    body_weights: str | os.PathLike[str] | None = None,
    for_weights: bool = False,
) -> Opened:
    """Return the network, the weights and the experiment that a name stands for, changed by the arguments.

    Args:
    - `name`: see `find_network`.
    - `changes`: keyword arguments of `zoo.get` that change the network.
    - `pretrained`: read the weights that are published under the name.
    - `weights`, `body_weights`: a weights file, published weights or a repository, for the network or for its body.
      Its settings complete the name and the changes.
    - `for_weights`: require weights, by default the published weights, and do not complete an experiment with the
      settings of a weights file.

    Raises ConfigError for an unknown name and wrong changes, TypeError for changes that the architecture does not have,
    and WeightsError for weights that are unavailable or belong to another network.
    """
    # 1. The name, changed by the arguments.
    opened = find_network(name)
    if [bool(pretrained), (opened.weights or weights) is not None, body_weights is not None].count(True) > 1:
        remedy = "give one of pretrained, weights, body_weights and a weights file"
        raise ConfigError("there are two sources of weights", name, remedy)
    needs_published = pretrained and not isinstance(opened.spec, ExternalSpec)
    if needs_published:
        opened = find_network(only_variant(opened.name))
    elif for_weights and opened.weights is None and weights is None:
        weights = _published_name(opened)
    if body_weights is not None and not _segments(opened.spec):
        what = f"{opened.spec.arch}: body_weights are for the body of a segmentation network"
        raise ConfigError(what, remedy="give weights=PATH")
    wanted = merge(opened.spec.given(), changes_of(opened.spec.arch, changes))

    # 2. The weights, whose description completes the settings of the network.
    from zoo.weights import read_weights
    from zoo.weights._description import complete_settings

    source = body_weights if weights is None else weights
    stored = opened.weights if source is None else read_weights(source)
    described = opened.record if needs_published else None if stored is None else stored.record
    if described is not None and not (for_weights and opened.experiment is not None):
        where = opened.name if stored is None else stored.path
        is_body = body_weights is not None
        wanted = complete_settings(described.spec, wanted, where, is_body=is_body, may_transfer=not needs_published)
    spec = parse_section(type(opened.spec), wanted, opened.spec.arch)
    if needs_published:  # may download, so only now, when the arguments are known to be valid
        stored = read_weights(opened.name)
    known = opened.network if described is None or body_weights is not None else described
    images = opened.network.preprocessing or known.preprocessing or default_preprocessing(spec)
    return Opened(
        name=opened.name,
        record=known.with_spec(spec).model_copy(update={"preprocessing": images}),
        weights=stored,
        experiment=opened.experiment or (None if stored is None else stored.experiment),
        is_experiment=opened.is_experiment,
    )


def _segments(spec: Spec) -> bool:
    return spec.arch in ARCHITECTURES and ARCHITECTURES[spec.arch].task == "segmentation"


def _find_experiment(name: str) -> Opened | None:
    if name in ARCHITECTURES:
        return None
    if name in published():
        experiment = published()[name].experiment
    elif (file := find_experiment(name)) is not None:
        name, experiment = file.stem, load_experiment(file)
    else:
        return None
    return Opened(name, experiment.record(), experiment=experiment, is_experiment=True)


def _find_architecture(name: str) -> Opened | None:
    section = spec_class(name)
    is_network = name in ARCHITECTURES or section is ExternalSpec
    return Opened(name, NetworkRecord(spec=section(arch=name))) if is_network else None


def _find_file(name: str) -> Opened | None:
    if not os.path.isfile(name) and not is_hub_name(name):
        return None
    from zoo.weights import read_weights

    stored = read_weights(name)
    return Opened(name, stored.record, stored, stored.experiment)


def _published_name(opened: Opened) -> str:
    """Return the name of the published weights to score if the user gives none."""
    if opened.experiment is None and not isinstance(opened.spec, ExternalSpec):
        return only_variant(opened.name)
    if opened.name not in published():
        what = f"there are no published weights of {escape(opened.name)}"
        raise WeightsError(what, remedy="give weights to score, --weights FILE")
    return opened.name


def only_variant(name: str) -> str:
    """Return ``name`` if it is a published variant, or the only published variant of the architecture ``name``.

    Raises WeightsError for any other name, and for an architecture with several variants.
    """
    if name in published():
        return name
    variants = [variant for variant, entry in published().items() if entry.arch == name]
    if not variants:
        raise WeightsError(f"{name} has no published weights; networks with weights: {', '.join(published())}")
    if len(variants) > 1:
        raise WeightsError(f"{name} has several published weights, name one of them: {', '.join(variants)}")
    return variants[0]


def default_preprocessing(spec: Spec) -> Preprocessing | None:
    """Return the preprocessing of an architecture's images; None for external networks, whose package knows it."""
    return None if isinstance(spec, ExternalSpec) else INPUTS[ARCHITECTURES[spec.arch].input].preprocessing()


def _unknown(name: str) -> ConfigError:
    """Return the error for an unknown name."""
    if os.sep in name or os.path.exists(name) or name.endswith((".pth", ".pt", ".tar", ".safetensors", ".json")):
        if os.path.isdir(name):
            return ConfigError("this is a folder", name, "give a file in it, such as model_best.pth.tar")
        remedy = "give the path of a file, or the name of a network or an experiment (zoo list shows all networks)"
        return ConfigError("there is no such file", name, remedy)
    names = [*ARCHITECTURES, *published(), *experiment_names()]
    what = f"there is no network, experiment or file called {escape(name)}"
    return ConfigError(what, remedy=_nearest_network(name, names))


def _nearest_network(name: str, names: Sequence[str]) -> str:
    """Suggest networks of timm and torchvision for an unknown name, otherwise the nearest of ``names``."""
    from zoo.models.external import similar_names, squeezed

    is_own = any(squeezed(each).startswith(squeezed(name)) for each in names)
    if not is_own and (found := similar_names(name)):
        return f"other packages have {join_names(found)} (zoo list shows the networks of zoo)"
    return nearest(name, names, "zoo list shows all networks")
