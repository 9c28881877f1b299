"""Freezes the parts of a network that ``optimizer.freeze`` names: parameters, and running statistics of norms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zoo.errors import ConfigError, join_names, nearest
from zoo.models.classifier import classifier_parameters
from zoo.torch_internals.data import NormBase

logger = logging.getLogger(__name__)

EXCEPT = "!"  # prefix of a pattern whose matches are trained
CLASSIFIER = "classifier"  # stands for the layer that computes logits, whatever its name


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Set ``requires_grad`` of the parameters that ``patterns`` select to False; return the names of frozen norms.

    Frozen norms have to stay in evaluation mode, because they update running statistics otherwise. A norm is frozen if
    all its parameters are; a norm without parameters, if the patterns select it.

    A pattern is the name of a module, with all its contents, or of a parameter; a shell-style pattern of such names; or
    "classifier" for `classifier_parameters`. A leading ``!`` makes it an exception. The last pattern that matches
    decides.

    Raises ConfigError, with the nearest names, for a pattern that matches nothing, and if nothing is left to train.
    """
    if not patterns:
        return []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    classifier = set(map(id, classifier_parameters(model)))
    own_names = [*(name for name, _ in model.named_modules() if name), *parameters]
    names = [*own_names, *[CLASSIFIER] * bool(classifier)]
    for pattern in patterns:
        bare = pattern.removeprefix(EXCEPT)
        if not any(fnmatchcase(name, bare) for name in names):
            what = f"{pattern!r} matches no module and no parameter of {type(model).__name__}"
            listing = f"its modules are {join_names(name for name, _ in model.named_children())}"
            raise ConfigError(what, "optimizer.freeze", nearest(bare, names, listing))

    def is_frozen(name: str) -> bool:
        """Return whether the last pattern that matches ``name``, or a module around it, is not an exception."""
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if name in parameters and id(parameters[name]) in classifier:
            around.append(CLASSIFIER)
        for pattern in reversed(patterns):
            if any(fnmatchcase(each, pattern.removeprefix(EXCEPT)) for each in around):
                return not pattern.startswith(EXCEPT)
        return False

    for name, parameter in parameters.items():
        if is_frozen(name):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        what = f"{join_names(patterns)}: no parameter is left to train"
        raise ConfigError(
            what, "optimizer.freeze", f'except a part with "{EXCEPT}NAME", such as "{EXCEPT}{CLASSIFIER}"'
        )
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    num_frozen = sum(size for size, trained in sizes if not trained)
    logger.info("%s of %s parameters are frozen", f"{num_frozen:,}", f"{sum(size for size, _ in sizes):,}")
    return list(_norms(model, is_frozen))


def _norms(model: nn.Module, is_frozen: Callable[[str], bool]) -> Iterator[str]:
    """Yield the names of the norms that are frozen."""
    for name, module in model.named_modules():
        if isinstance(module, NormBase):
            own = [f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters()]
            if all(map(is_frozen, own or [name])):
                yield name
