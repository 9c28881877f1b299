"""The names of the networks of this package, as `zoo list` prints them. Does not import torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from zoo.config.architectures import ARCHITECTURES
from zoo.config.published import published
from zoo.errors import ConfigError


def list_models(pattern: str | Sequence[str] = "*", pretrained: bool = False) -> list[str]:
    """Return the sorted names of architectures and published variants that match a shell-style ``pattern``.

    For several patterns, returns the names that match any of them. With ``pretrained``, returns published variants
    only. Raises ConfigError for anything but text.
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
