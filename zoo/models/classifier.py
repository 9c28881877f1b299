"""The parameters of the classifier of any network."""

from __future__ import annotations

from typing import Any

from torch import nn

CLASSIFIER_NAMES = ("fc", "classifier", "heads", "head")  # names in torchvision


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the layer that computes logits; empty if the network has none, or none is known.

    Networks of this package and of timm have a method ``get_classifier``, which returns a module or a tuple of modules.
    For other networks, the classifier is the last linear or convolutional layer of the submodule with a name in
    `CLASSIFIER_NAMES`.
    """
    get_classifier: Any = getattr(model, "get_classifier", None)
    if get_classifier is not None:
        found = get_classifier()
        modules = found if isinstance(found, (tuple, list)) else [found]
        return [parameter for each in modules if each is not None for parameter in each.parameters()]
    children = dict(model.named_children())
    head = next((children[name] for name in CLASSIFIER_NAMES if name in children), None)
    if head is None:
        return []
    layers = [layer for layer in head.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    return list((layers[-1] if layers else head).parameters())
