"""The options that families of networks have beside the common arguments: what each means and which values it takes.

Whether an option is possible together with others is for the family to say, which raises ConfigError too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zoo.errors import ConfigError

MAX_DILATION = 1024
MAX_BLOCKS = 1000  # of one level; the deepest published i-RevNet has 300 in all
MAX_CHANNELS = 4096
MAX_LEVELS = 8

# What the sizes below may amount to together. A network beyond these would fill the machine, or take minutes to build.
SIZES = ("blocks", "widths", "units", "layers", "pools", "channels")
MAX_TOTAL_DEPTH = 5_000  # blocks of all levels, times the units of a branch; the deepest published i-RevNet has 300
MAX_PARAMETERS = 2_000_000_000  # 8 GB in single precision; the largest published network here has 1.1e8


class Option(NamedTuple):
    """An option: one sentence that explains it, what its values are, and whether something is such a value."""

    meaning: str
    values: str
    accepts: Callable[[Any], bool]


def is_whole(value: Any, low: int, high: int) -> bool:
    """Return whether ``value`` is an int from ``low`` to ``high``; True and False are none."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float, high: float) -> bool:
    """Return whether ``value`` is a finite int or float from ``low`` to ``high``; True and False are none."""
    return type(value) in (int, float) and low <= value <= high  # which NaN is not


def is_list_of(value: Any, accepts: Callable[[Any], bool], max_length: int) -> bool:
    """Return whether ``value`` is a list or tuple of 1 to ``max_length`` items, each of them accepted."""
    return isinstance(value, (list, tuple)) and 1 <= len(value) <= max_length and all(map(accepts, value))


def is_dilation(value: Any) -> bool:
    """Return whether ``value`` is a dilation, or a list of such, or of lists of such."""

    def is_rate(item: Any) -> bool:
        return is_whole(item, 1, MAX_DILATION)

    def is_entry(item: Any) -> bool:
        return is_rate(item) or is_list_of(item, is_rate, MAX_BLOCKS)

    return is_rate(value) or is_list_of(value, is_entry, MAX_LEVELS)


def check_dilation(value: Any) -> Any:
    """Return the dilation of an experiment file; ValueError for anything else."""
    if is_dilation(value):
        return value
    raise ValueError(
        f"should be a whole number from 1 to {MAX_DILATION}, or a list with one entry (or list) per module"
    )


def _counts(low: int, high: int) -> tuple[str, Callable[[Any], bool]]:
    """Return the values of a list of whole numbers, one per level."""
    values = f"a list of 1 to {MAX_LEVELS} whole numbers from {low} to {high}"
    return values, lambda value: is_list_of(value, lambda item: is_whole(item, low, high), MAX_LEVELS)


def _switch() -> tuple[str, Callable[[Any], bool]]:
    return "True or False", lambda value: isinstance(value, bool)


OPTIONS: dict[str, Option] = {
    "input_3x3": Option("the stem is three 3x3 convolutions instead of one 7x7", *_switch()),
    "dilation": Option(
        "dilates the convolutions of modules in place of their strides: 1 for none, or one number for each of mod2 to "
        "mod5 ([1, 1, 2, 4] keeps stride 8), in ResNeXt also a list per module with a number per block, in DenseNet "
        "also one number for all, in WiderResNet-A2 True; output_stride sets it",
        f"a whole number from 1 to {MAX_DILATION}, a list with one entry (or list) per module, or in wider_resnet*_a2 "
        "True or False",
        lambda value: isinstance(value, bool) or is_dilation(value),
    ),
    "keep_outputs": Option("forward returns the outputs of all modules, and the logits behind them", *_switch()),
    "memory": Option(
        "what is kept for backward; it changes neither weights nor results",
        "one of the words that the network has",
        lambda value: isinstance(value, str),
    ),
    "blocks": Option(
        "numbers of blocks, one per level (in revnext one per pool, for the level behind it)", *_counts(0, MAX_BLOCKS)
    ),
    "widths": Option(
        "channels of the half that a block changes, one per level, each four times the one before",
        *_counts(2, MAX_CHANNELS),
    ),
    "units": Option(
        "how many times convolution, norm and leaky ReLU follow each other in a branch",
        f"a whole number from 1 to {MAX_BLOCKS}",
        lambda value: is_whole(value, 1, MAX_BLOCKS),
    ),
    "layers": Option(
        "numbers of invertible layers, one per level; the stem is the first of the first level",
        *_counts(0, MAX_BLOCKS),
    ),
    "pools": Option(
        'kinds of the pools between the levels: "channel" makes the windows channels, "batch" images',
        'a list of "channel" and "batch"',
        lambda value: is_list_of(value, lambda item: item in ("channel", "batch"), MAX_LEVELS - 1),
    ),
    "channels": Option(
        "channels of the stem; an even number, as blocks halve them",
        f"an even number from 2 to {MAX_CHANNELS}",
        lambda value: is_whole(value, 2, MAX_CHANNELS) and value % 2 == 0,
    ),
    "keep_branch_input": Option(
        "keeps the exact input of a branch while the branch is undone, for 64 bytes per pixel and far smaller errors",
        *_switch(),
    ),
    "eps_i": Option(
        "added to the absolute scales of invertible norms, so that none of them is too small to be undone",
        "a number from 0 to 1",
        lambda value: is_number(value, 0, 1),
    ),
    "dropout": Option(
        "share of the values that blocks set to zero in training",
        "a number from 0 to 0.99",
        lambda value: is_number(value, 0, 0.99),
    ),
}


def check_option(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is one that the option can have; unknown options are let through."""
    option = OPTIONS.get(name)
    if option is not None and not option.accepts(value):
        raise ConfigError(f"{name} must be {option.values}, got {value!r}")
