"""Upper limits and choices of values from files and callers, and predicates for them.

The limits are far beyond any use and below what would overflow or hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

# Pixels of an image, decoded or resized: 256 MiB as RGB. PIL warns above this limit and fails above twice this limit.
MAX_PIXELS = 2**28 // 3
MAX_SIDE = math.isqrt(MAX_PIXELS)
MAX_FILE_BYTES = 2**30  # of an image, which may be stored uncompressed, with 16 bits a value
MAX_CLASSES = 100_000  # of experiments, networks and weights files; ImageNet-21k has 21,841
MAX_BATCH = 10_000_000  # ImageNet has 1.3 million training images
MAX_EPOCHS = 1_000_000
MAX_STEPS = 10**9
MAX_RATE = 1e6  # learning rates, weight decay and gains
MAX_SLOPE = 1e3  # slope of leaky_relu, alpha of elu

# Sizes of networks.
MAX_DILATION = 1024
MAX_BLOCKS = 1000  # of one level; the deepest published i-RevNet has 300 in all
MAX_CHANNELS = 4096
MAX_LEVELS = 8

# How validation images are resized and cropped.
Interpolation = Literal["bilinear", "bicubic"]
CropMode = Literal["center", "squash", "border"]


def is_whole(value: Any, low: int, high: int) -> bool:
    """Return whether ``value`` is an int, not a bool, from ``low`` to ``high``."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    """Return whether ``value`` is a finite int or float, not a bool, from ``low`` to ``high``."""
    return type(value) in (int, float) and low <= value <= high  # False for NaN


def is_list_of(value: Any, accepts: Callable[[Any], bool], max_length: int) -> bool:
    """Return whether ``value`` is a list or tuple of 1 to ``max_length`` items that ``accepts`` returns True for."""
    return isinstance(value, (list, tuple)) and 1 <= len(value) <= max_length and all(map(accepts, value))


def is_dilation(value: Any) -> bool:
    """Return whether ``value`` is a dilation rate, or a list whose entries are rates or lists of rates."""

    def is_rate(item: Any) -> bool:
        return is_whole(item, 1, MAX_DILATION)

    def is_entry(item: Any) -> bool:
        return is_rate(item) or is_list_of(item, is_rate, MAX_BLOCKS)

    return is_rate(value) or is_list_of(value, is_entry, MAX_LEVELS)
