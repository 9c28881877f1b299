"""Loads the content of a weights file into a network, after a comparison of their descriptions.

Tested by tests/weights/test_load.py and tests/weights/test_deeplab.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import nn

from zoo.config.network import NetworkSpec
from zoo.errors import escape
from zoo.models.build import build_on_meta
from zoo.models.segmentation import SegmentationNetwork
from zoo.weights.description import ASKED_BY_NETWORK, check_same_network, settings_of_network
from zoo.weights.load import LoadReport, is_segmentation, load_state_dict
from zoo.weights.stored import StoredWeights

logger = logging.getLogger("zoo")


def load_stored(model: nn.Module, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the content of a weights file into ``model``; return a report.

    Loading is strict, with two exceptions. The file's classifier is dropped, with a warning, if the model has none or
    one with another number of classes. A segmentation network loads the weights of a classification network into its
    body, see `load_body`. If file and model both have a spec, these must agree: weights trained with another activation
    or norm have the same shapes, but compute something else. Raises WeightsError if the file does not fit; the model is
    then unchanged. See `check_same_network` for ``asked_by``.
    """
    if isinstance(model, SegmentationNetwork) and not is_segmentation(stored.state_dict):
        return load_body(model, stored, asked_by)
    built_as = getattr(model, "built_as", None)
    if built_as is not None and stored.spec is not None:
        if built_as.is_external:
            return _load_external(model, built_as, stored, stored.spec, asked_by)
        check_same_network(stored.spec, settings_of_network(built_as), stored.path, asked_by)
    return load_state_dict(model, stored.state_dict, source=escape(stored.path))


def _load_external(
    model: nn.Module, built_as: NetworkSpec, stored: StoredWeights, spec: NetworkSpec, asked_by: str
) -> LoadReport:
    """Load a checkpoint into an external network. A classifier with other classes is dropped, with a warning.

    If the numbers of classes differ, the classifier is determined as the tensors whose shapes differ.
    """
    source = escape(stored.path)
    check_same_network(spec, {"arch": built_as.arch}, stored.path, asked_by)
    if spec.num_classes == built_as.num_classes:
        return replace(load_state_dict(model, stored.state_dict, source=source), classifier="loaded")
    of_file, of_network = (
        build_on_meta(spec.model_copy(update={"num_classes": num_classes})).state_dict()
        for num_classes in (spec.num_classes, built_as.num_classes)
    )
    unused = {key for key, like in of_file.items() if key not in of_network or of_network[key].shape != like.shape}
    own = {key: tensor for key, tensor in model.state_dict().items() if key in unused}
    used = {key: tensor for key, tensor in stored.state_dict.items() if key not in unused}
    report = load_state_dict(model, {**used, **own}, source=source)
    logger.warning(
        "%s: the classifier was dropped because it has %d classes, and the network %d%s",
        source, spec.num_classes, built_as.num_classes, "; the network keeps its initial classifier" if own else "",
    )  # fmt: skip
    return replace(report, num_loaded=len(used), classifier="kept" if own else "dropped")


def load_body(model: SegmentationNetwork, stored: StoredWeights, asked_by: str = ASKED_BY_NETWORK) -> LoadReport:
    """Load the weights of a classification network into the body of ``model``; log and return a report.

    The file's classifier is dropped; head and cls keep their values. A `wider_resnet*_a2` accepts the weights of the
    plain form. Raises WeightsError as `load_weights` does, also for a file of another body.
    """
    source, built_as = escape(stored.path), model.built_as
    if built_as is not None and stored.spec is not None:
        check_same_network(stored.spec, settings_of_network(built_as), stored.path, asked_by, is_body=True)
    report = load_state_dict(model.body, stored.state_dict, source=source)
    initial = tuple(name for name, _ in model.named_children() if name != "body")
    logger.info(
        "%s: %d tensors were loaded into the body; %s keep their initial values",
        source, report.num_loaded, " and ".join(initial),
    )  # fmt: skip
    return replace(report, initial=initial)
