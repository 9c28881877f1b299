"""Static facts about each architecture; importable without torch.

A new network is a row of `ARCHITECTURES`. A new family also needs a class in `zoo.models.build.FAMILIES`, and a new
option an entry in `OPTIONS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zoo.errors import ConfigError, nearest, shorten_repr
from zoo.limits import (
    MAX_BLOCKS,
    MAX_CHANNELS,
    MAX_DILATION,
    MAX_LEVELS,
    MAX_SIDE,
    is_dilation,
    is_list_of,
    is_number,
    is_whole,
)


class Option(NamedTuple):
    """An option: its meaning, a description of its values, and a predicate that accepts valid values."""

    meaning: str
    values: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Architecture:
    """Static facts about one network.

    Args:
    - `name`: the name in `zoo.get` and experiment files.
    - `family`: the class that builds the network, a key of `zoo.models.build.FAMILIES`.
    - `structure`: fixed arguments of that class, such as the blocks per stage.
    - `options`: the arguments that a user may choose, with their defaults, in the order in which they are listed; see
      `OPTIONS`. "memory" is always among them.
    - `memory`: the values of the option "memory".
    - `dilations`: maps the stride of the last feature map to the value of the option "dilation" that produces it; empty
      where the stride is fixed.
    - `input`: "imagenet" (224 pixels, 1000 classes) or "cifar" (32 pixels, 10 classes).
    - `task`: "classification" (logits of an image) or "segmentation" (logits of each pixel; 19 classes, as Cityscapes).
    - `leaky_relu_only`: whether leaky ReLU is the only activation, because layers are inverted one by one.
    - `ignores_input_3x3`: whether experiment files may set input_3x3 without effect, as the original project's files of
      a WiderResNet and a ResNet-34 do.
    """

    name: str
    family: str
    structure: Mapping[str, Any]
    options: Mapping[str, Any]
    memory: tuple[str, ...]
    dilations: Mapping[int, Any]
    input: Literal["imagenet", "cifar"] = "imagenet"
    task: Literal["classification", "segmentation"] = "classification"
    leaky_relu_only: bool = False
    ignores_input_3x3: bool = False

    @property
    def num_classes(self) -> int:
        """The default number of classes."""
        if self.task == "segmentation":
            return 19
        return 1000 if self.input == "imagenet" else 10


def architecture(name: str) -> Architecture:
    """Return the facts about the network ``name``; ConfigError, with the nearest names, if it is unknown."""
    if name not in ARCHITECTURES:
        near = ", ".join(nearest(name, ARCHITECTURES))
        raise ConfigError(f"unknown network {name!r}; the nearest names are {near} (zoo list shows all)")
    return ARCHITECTURES[name]


@cache
def network_sizes() -> dict[str, dict[str, Any]]:
    """Return the sizes of each architecture with its default options, and of ``NAME+input_3x3`` with that stem.

    ``parameters`` is the number of parameters, ``headless`` without the classifier; ``norms`` is the number of norms
    with running statistics; ``stages`` has the channels, the reduction and the module of each stage.
    """
    sizes: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("network_sizes.json").read_text())
    return sizes


def is_external(name: str) -> bool:
    """Return whether ``name`` is that of a network of another package, "PACKAGE:NAME"; it may be unknown there."""
    package, colon, _ = name.partition(":")
    return bool(colon) and package in PACKAGES


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Return whether ``name`` is that of a repository on the Hugging Face Hub, right or wrong."""
    return os.fspath(name).startswith(HUB_PREFIX)


def has_same_tensors(first: str, second: str) -> bool:
    """Return whether two networks have the same state-dict keys and shapes, up to the number of classes.

    A WiderResNet and its A2 variant differ only in pooling and dropout, which have no tensors.
    """
    if first == second:
        return True
    families = {ARCHITECTURES[name].family for name in (first, second)}
    return families == {"wider_resnet", "wider_resnet_a2"} and (
        ARCHITECTURES[first].structure == ARCHITECTURES[second].structure
    )


def check_option(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is allowed for the option ``name``; unknown options are accepted."""
    option = OPTIONS.get(name)
    if option is not None and not option.accepts(value):
        raise ConfigError(f"{name} must be {option.values}, got {shorten_repr(value)}")


# The packages whose networks are known by names such as "torchvision:resnet50", see `zoo.models.external`.
PACKAGES = ("timm", "torchvision")
HUB_PREFIX = "hf-hub:"  # the beginning of the name of a repository on the Hugging Face Hub
# The value of "memory" that every network has: "auto", and recipes in place of activations (`zoo.lean`).
LEAN = "lean"
# The values that networks of other packages have; "auto" is "plain" there.
EXTERNAL_MEMORY = ("auto", "plain", LEAN)


def _counts(low: int, high: int) -> tuple[str, Callable[[Any], bool]]:
    """Return the ``values`` and ``accepts`` of an `Option` that is a list of integers, one per level."""
    values = f"a list of 1 to {MAX_LEVELS} whole numbers from {low} to {high}"
    return values, lambda value: is_list_of(value, lambda item: is_whole(item, low, high), MAX_LEVELS)


_SWITCH: tuple[str, Callable[[Any], bool]] = ("True or False", lambda value: isinstance(value, bool))

OPTIONS: dict[str, Option] = {
    "input_3x3": Option("the stem is three 3x3 convolutions instead of one 7x7", *_SWITCH),
    "dilation": Option(
        "dilations of the convolutions of mod2 to mod5, which replace strides: 1 for none, or one number per module "
        "([1, 1, 2, 4]: output stride 8); in ResNet and ResNeXt also a list per module with a number per block, in "
        "DenseNet also one number for all modules, in WiderResNet-A2 True, or [1, 1, 2, 2] (mod4 to mod7) for output "
        "stride 16; set by output_stride",
        f"a whole number from 1 to {MAX_DILATION}, a list with one entry (or list) per module, or in wider_resnet*_a2 "
        "True or False",
        lambda value: isinstance(value, bool) or is_dilation(value),
    ),
    "output_stride": Option(
        "ratio of the resolutions of the image and of the feature map that the head reads (default: 8); sets the "
        "dilation of the body",
        "8 or 16",
        lambda value: type(value) is int and value in (8, 16),
    ),
    "head_dilations": Option(
        "dilations of the head's three 3x3 convolutions (default: 12, 24, 36 with output_stride 8, and half of these "
        "with 16)",
        f"three whole numbers from 1 to {MAX_DILATION}",
        lambda value: is_list_of(value, lambda item: is_whole(item, 1, MAX_DILATION), 3) and len(value) == 3,
    ),
    "pooling_size": Option(
        "window of the average pooling in the head's pooled branch in evaluation, in cells of the feature map "
        "(default: the whole map); in training, the branch averages over the whole crop",
        f"a whole number from 1 to {MAX_SIDE}, or two (rows, columns)",
        lambda value: (
            is_whole(value, 1, MAX_SIDE)
            or (is_list_of(value, lambda item: is_whole(item, 1, MAX_SIDE), 2) and len(value) == 2)
        ),
    ),
    "keep_outputs": Option("forward returns the outputs of all modules, followed by the logits", *_SWITCH),
    "memory": Option(
        "strategy for saving activations; it changes neither weights nor results",
        "one of the strategies of the network",
        lambda value: isinstance(value, str),
    ),
    "blocks": Option(
        "numbers of blocks, one per level (in revnext one per pool, for the level after it)", *_counts(0, MAX_BLOCKS)
    ),
    "widths": Option(
        "channels of the half that a block changes, one per level, each four times the previous one",
        *_counts(2, MAX_CHANNELS),
    ),
    "units": Option(
        "number of units of convolution, norm and leaky ReLU in a branch",
        f"a whole number from 1 to {MAX_BLOCKS}",
        lambda value: is_whole(value, 1, MAX_BLOCKS),
    ),
    "layers": Option(
        "numbers of invertible layers, one per level; the stem is the first layer of the first level",
        *_counts(0, MAX_BLOCKS),
    ),
    "pools": Option(
        'kinds of the pools between the levels: "channel" moves the pixels of a window to channels, "batch" to the '
        "batch dimension",
        'a list of "channel" and "batch"',
        lambda value: is_list_of(value, lambda item: item in ("channel", "batch"), MAX_LEVELS - 1),
    ),
    "channels": Option(
        "channels of the stem, an even number, because blocks halve them",
        f"an even number from 2 to {MAX_CHANNELS}",
        lambda value: is_whole(value, 2, MAX_CHANNELS) and value % 2 == 0,
    ),
    "keep_branch_input": Option(
        "saves the exact input of a branch while the branch is inverted: 64 bytes per pixel for much smaller errors",
        *_SWITCH,
    ),
    "eps_i": Option(
        "added to the absolute scales of invertible norms, so that all of them can be inverted",
        "a number from 0 to 1",
        lambda value: is_number(value, 0, 1),
    ),
    "dropout": Option(
        "dropout probability in blocks",
        "a number from 0 to 0.99",
        lambda value: is_number(value, 0, 0.99),
    ),
    "drop_path_rate": Option(
        "stochastic depth: probability with which the last block drops its branch for an image in training; it rises "
        "linearly from 0 in the first block",
        "a number from 0 to 0.99",
        lambda value: is_number(value, 0, 0.99),
    ),
}


def _family(
    family: str,
    networks: Mapping[str, Mapping[str, Any]],
    *,
    memory: tuple[str, ...] = ("auto", "plain"),
    options: Mapping[str, Any] | None = None,
    dilations: Mapping[int, Any] | None = None,
    **others: Any,
) -> dict[str, Architecture]:
    """Return the architectures of a family; ``networks`` maps names to structures."""
    options = {**(options or {}), "memory": "auto"}
    return {
        name: Architecture(name, family, structure, options, (*memory, LEAN), dilations or {}, **others)
        for name, structure in networks.items()
    }


# The dilations of mod2 to mod5 for strides 32, 16 and 8 of the last feature map.
_DILATIONS = {32: 1, 16: [1, 1, 1, 2], 8: [1, 1, 2, 4]}
CHECKPOINTED = ("auto", "plain", "checkpoint")
_WIDER = {"16": (1, 1, 1, 1, 1, 1), "20": (1, 1, 1, 3, 1, 1), "38": (3, 3, 6, 3, 1, 1)}
_REVNET_WIDTHS = (128, 128, 256, 512, 832)
_REVNEXT_OPTIONS = {"pools": ("channel", "channel"), "channels": 32, "eps_i": 1e-4}

ARCHITECTURES: dict[str, Architecture] = {
    **_family(
        "resnet",
        {
            "resnet18": {"structure": (2, 2, 2, 2), "bottleneck": False},
            "resnet34": {"structure": (3, 4, 6, 3), "bottleneck": False},
            "resnet50": {"structure": (3, 4, 6, 3), "bottleneck": True},
            "resnet101": {"structure": (3, 4, 23, 3), "bottleneck": True},
            "resnet152": {"structure": (3, 8, 36, 3), "bottleneck": True},
        },
        options={"dilation": 1, "keep_outputs": False, "drop_path_rate": 0.0},
        memory=("auto", "plain", "fused", "checkpoint"),
        dilations=_DILATIONS,
        ignores_input_3x3=True,
    ),
    **_family(
        "resnext",
        {
            "resnext50": {"structure": (3, 4, 6, 3)},
            "resnext101": {"structure": (3, 4, 23, 3)},
            "resnext152": {"structure": (3, 8, 36, 3)},
        },
        options={"input_3x3": False, "dilation": 1, "drop_path_rate": 0.0},
        memory=CHECKPOINTED,
        dilations=_DILATIONS,
    ),
    **_family(
        "wider_resnet",
        {f"wider_resnet{depth}": {"structure": structure} for depth, structure in _WIDER.items()},
        options={"drop_path_rate": 0.0},
        memory=CHECKPOINTED,
        ignores_input_3x3=True,
    ),
    **_family(
        "wider_resnet_a2",
        {f"wider_resnet{depth}_a2": {"structure": structure} for depth, structure in _WIDER.items()},
        options={"dilation": False, "drop_path_rate": 0.0},
        memory=CHECKPOINTED,
        dilations={32: False, 16: (1, 1, 2, 2), 8: True},
        ignores_input_3x3=True,
    ),
    **_family(
        "densenet",
        {
            "densenet121": {"structure": (6, 12, 24, 16)},
            "densenet169": {"structure": (6, 12, 32, 32)},
            "densenet201": {"structure": (6, 12, 48, 32)},
            "densenet264": {"structure": (6, 12, 64, 48)},
        },
        options={"input_3x3": False, "dilation": 1},
        memory=CHECKPOINTED,
        dilations=_DILATIONS,
    ),
    **_family(
        "preact",
        {
            "resnet32_cifar": {"structure": (5, 5, 5), "widths": (16, 16, 32, 64), "bottleneck": False},
            "resnet110_cifar": {"structure": (18, 18, 18), "widths": (16, 16, 32, 64), "bottleneck": False},
            "resnet164_cifar": {"structure": (18, 18, 18), "widths": (16, 16, 32, 64), "bottleneck": True},
        },
        options={"drop_path_rate": 0.0},
        memory=("auto", "plain", "checkpoint"),
        input="cifar",
    ),
    **_family(
        "preact",
        {"resnet101_preact": {"structure": (3, 4, 23, 3), "widths": (64, 64, 128, 256, 512), "bottleneck": True}},
        options={"drop_path_rate": 0.0},
        memory=("auto", "plain", "checkpoint"),
    ),
    **_family(
        "revnet",
        {
            "revnet38_cifar": {"structure": (3, 3, 3), "widths": (32, 32, 64, 112), "bottleneck": False},
            "revnet110_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": False},
            "revnet164_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": True},
        },
        input="cifar",
    ),
    **_family(
        "revnet",
        {
            "revnet56": {"structure": (2, 2, 3, 2), "widths": _REVNET_WIDTHS, "bottleneck": True},
            # 45,428,072 parameters; 45.2 M in the paper
            "revnet104": {"structure": (2, 2, 11, 2), "widths": _REVNET_WIDTHS, "bottleneck": True},
        },
    ),
    **_family(
        "irevnet",
        {"irevnet_cifar": {}},
        options={"blocks": (18, 18, 18), "widths": (16, 64, 256), "dropout": 0.1},
        input="cifar",
    ),
    **_family(
        "irevnet_two_branch",
        {"irevnet_revnext": {}},
        options={"blocks": (2, 2, 2, 1), "channels": 32},
        input="cifar",
    ),
    **_family(
        "revnext",
        {"revnext": {}},
        options={"blocks": (1, 2), "units": 2, **_REVNEXT_OPTIONS, "keep_branch_input": True},
        input="cifar",
        leaky_relu_only=True,
    ),
    **_family(
        "revnext_flat",
        {"revnext_flat": {}},
        options={"layers": (1, 1, 1), **_REVNEXT_OPTIONS},
        input="cifar",
        leaky_relu_only=True,
    ),
    **_family(
        "revnext_baseline",
        {
            "revnext_resnet18": {"reversible": False, "blocks": (2, 2, 2, 2)},
            "revnext_revnet": {"reversible": True, "blocks": (4, 4, 4, 4)},
        },
        options={"channels": 32},
        input="cifar",
    ),
}


def _deeplab(body: Architecture) -> Architecture:
    """Return DeepLabV3 on ``body``, with the memory strategies and the stem of the body."""
    stem = {option: body.options[option] for option in ("input_3x3",) if option in body.options}
    options = {
        **stem,
        "output_stride": None,
        "dilation": None,
        "head_dilations": None,
        "pooling_size": None,
        "memory": "auto",
    }
    return Architecture(
        f"deeplab_{body.name}",
        "deeplab",
        {"body": body.name},
        options,
        body.memory,
        dilations={},  # the option output_stride dilates the body
        task="segmentation",
        ignores_input_3x3=body.ignores_input_3x3,
    )


ARCHITECTURES |= {
    arch.name: arch for arch in [_deeplab(body) for body in ARCHITECTURES.values() if 8 in body.dilations]
}

# ResNet -> its RevNet counterpart in Gomez et al. 2017, Table 2.
REVERSIBLE_TWINS = {
    "resnet32_cifar": "revnet38_cifar",
    "resnet110_cifar": "revnet110_cifar",
    "resnet164_cifar": "revnet164_cifar",
    "resnet101_preact": "revnet104",
}
