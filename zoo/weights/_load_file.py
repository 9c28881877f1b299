"""Loads the content of a weights file into a network after comparing their descriptions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from zoo.config.network import ExternalSpec, Spec
from zoo.errors import ConfigError
from zoo.models.build import build_on_meta
from zoo.models.family import network_class
from zoo.models.segmentation import SegmentationNetwork
from zoo.tables import counted
from zoo.weights._description import ASKED_BY_NETWORK, check_same_network, settings_of_network
from zoo.weights._load import LoadReport, count_outputs, is_segmentation, load_state_dict, log_classifier
from zoo.weights._stored import StoredWeights

logger = logging.getLogger("zoo")


def load_stored(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the content of a weights file into ``model``; return a report.

    Loading is strict, with two exceptions. The file's classifier is dropped, with a warning, if the model has none or
    if the numbers of classes differ. A segmentation network loads the weights of a classification network into its
    body, see `load_body`. If file and model both have a spec, the specs must agree: weights trained with another
    activation or norm have the same shapes, but compute something else. Raises WeightsError, and leaves the model
    unchanged, if the file does not fit. See `check_same_network` for ``asked_by``.
    """
    if isinstance(model, SegmentationNetwork) and not is_segmentation(stored.state_dict):
        return load_body(model, stored, asked_by)
    built_as = getattr(model, "built_as", None)
    if built_as is not None and stored.spec is not None:
        check_same_network(stored.spec, settings_of_network(built_as), stored.path, asked_by)
    if isinstance(built_as, ExternalSpec):
        return _load_external(model, built_as, stored)
    return load_state_dict(model, stored.state_dict, source=stored.source)


def count_classes(state_dict: Mapping[str, Tensor], spec: Spec, source: str) -> int:
    """Return the number of classes of a state dict for the network of ``spec``; 0 if it has no classifier.

    Raises WeightsError, naming ``source``, like `count_outputs`.
    """
    if not isinstance(spec, ExternalSpec):
        return count_outputs(state_dict, network_class(spec.arch), source)
    return _count_classes(state_dict, *_with_two_and_three_classes(spec))


def _load_external(model: nn.Module, built_as: ExternalSpec, stored: StoredWeights) -> LoadReport:
    """Load a file into a network of another package, except for a classifier with another number of classes.

    A network without classifier, such as a headless network of timm, may also lack the layers before the classifier.
    """
    source, own, of_file = stored.source, model.state_dict(), stored.state_dict
    two, three = _with_two_and_three_classes(built_as)
    num_own, num_in_file = _count_classes(own, two, three), _count_classes(of_file, two, three)
    if num_in_file in (0, num_own):
        report = load_state_dict(model, of_file, source=source)
        return replace(report, classifier="loaded" if num_own else "none")
    unused = _keys_of_classifier(two, three) if num_own else two.keys() - own.keys()
    used = {key: tensor for key, tensor in of_file.items() if key not in unused}
    initial = {key: tensor for key, tensor in own.items() if key in unused}
    report = load_state_dict(model, {**used, **initial}, source=source)
    report = replace(report, num_loaded=len(used), classifier="kept" if num_own else "dropped")
    log_classifier(report, num_in_file, num_own)
    return report


def _with_two_and_three_classes(spec: ExternalSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return state dicts of an external network with 2 and 3 classes, on the meta device.

    Their difference is the classifier, which has another name in each network. Both are empty if the network's builder
    has no argument for the number of classes.
    """
    try:
        two, three = (build_on_meta(spec.model_copy(update={"num_classes": number})) for number in (2, 3))
    except ConfigError:
        return {}, {}
    return two.state_dict(), three.state_dict()


def _keys_of_classifier(two: Mapping[str, Tensor], three: Mapping[str, Tensor]) -> set[str]:
    return {key for key in two if two[key].shape != three[key].shape}


def _count_classes(state_dict: Mapping[str, Tensor], two: Mapping[str, Tensor], three: Mapping[str, Tensor]) -> int:
    """Return the number of classes that explains the shapes of all classifier tensors; 0 if there is none.

    A tensor may have several rows per class, like the boxes of a detector.
    """
    numbers = set()
    for key in _keys_of_classifier(two, three):
        shape, rows = state_dict[key].shape if key in state_dict else (), len(two[key])
        rows_per_class = len(three[key]) - rows
        if not shape or shape[1:] != two[key].shape[1:] or not rows_per_class or (shape[0] - rows) % rows_per_class:
            return 0
        numbers.add(2 + (shape[0] - rows) // rows_per_class)
    return max(0, *numbers) if len(numbers) == 1 else 0


def load_body(model: SegmentationNetwork, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the weights of a classification network into the body of ``model``; log and return a report.

    Drops the file's classifier; head and cls keep their values. A `wider_resnet*_a2` accepts the weights of the plain
    form. Raises WeightsError like `load_weights`, also for a file of another body.
    """
    source, built_as = stored.source, model.built_as
    if built_as is not None and stored.spec is not None:
        check_same_network(stored.spec, settings_of_network(built_as), stored.path, asked_by, is_body=True)
    report = load_state_dict(model.body, stored.state_dict, source=source)
    initial = tuple(name for name, _ in model.named_children() if name != "body")
    logger.info(
        "%s: loaded %s into the body; %s keep their initial values",
        source, counted(report.num_loaded, "tensor"), " and ".join(initial),
    )  # fmt: skip
    return replace(report, initial=initial)
