"""Static facts about each architecture; importable without torch.

A new network is a row of `ARCHITECTURES`. A new family also needs a class in `zoo.models.family.FAMILIES`, and its
options a section in `zoo.config.options`.

Tested by tests/config/test_network.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from zoo.config.options import (
    DeepLabOptions,
    DeepLabStemOptions,
    DenseNetOptions,
    FlatRevNeXtOptions,
    IRevNetOptions,
    ResNetOptions,
    ResNeXtOptions,
    RevBiFPNOptions,
    ReversibleOptions,
    RevNeXtOptions,
    RevViTOptions,
    StemOptions,
    StochasticDepth,
    WiderResNetA2Options,
)
from zoo.config.section import Section
from zoo.errors import ConfigError, join_names, nearest


@dataclass(frozen=True)
class Architecture:
    """Static facts about one network.

    Args:
    - `name`: the name in `zoo.get` and experiment files.
    - `family`: the class that builds the network, a key of `zoo.models.family.FAMILIES`.
    - `structure`: fixed arguments of that class, such as the blocks per stage.
    - `options`: the section of the arguments that a user may choose, see `zoo.config.options`.
    - `memory`: the values of the argument "memory", which every network has.
    - `dilations`: maps the stride of the last feature map to the value of the option "dilation" that produces it; empty
      where the stride is fixed.
    - `input`: "imagenet" (224 pixels, 1000 classes) or "cifar" (32 pixels, 10 classes).
    - `task`: "classification" (logits of an image) or "segmentation" (logits of each pixel; 19 classes, as Cityscapes).
    - `ignores_input_3x3`: whether experiment files may set input_3x3 without effect, as the original project's files of
      a WiderResNet and a ResNet-34 do.
    - `made_lean`: the value of "memory" that `zoo.lean` is applied to for the value "lean".
    - `has_own_layers`: whether norms, activation and initial weights are fixed, so that a spec does not choose them.
    """

    name: str
    family: str
    structure: Mapping[str, Any]
    options: type[Section]
    memory: tuple[str, ...]
    dilations: Mapping[int, Any]
    input: Literal["imagenet", "cifar"] = "imagenet"
    task: Literal["classification", "segmentation"] = "classification"
    ignores_input_3x3: bool = False
    made_lean: str = "auto"
    has_own_layers: bool = False

    @property
    def num_classes(self) -> int:
        """The default number of classes."""
        if self.task == "segmentation":
            return 19
        return 1000 if self.input == "imagenet" else 10


def architecture(name: str) -> Architecture:
    """Return the facts about the network ``name``; ConfigError, with the nearest names, if it is unknown."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown network {name!r}", remedy=nearest(name, ARCHITECTURES, "zoo list shows all"))
    return ARCHITECTURES[name]


@cache
def network_sizes() -> dict[str, dict[str, Any]]:
    """Return the sizes of each architecture with its default options, and of ``NAME+input_3x3`` with that stem.

    ``parameters`` is the number of parameters, ``headless`` without the classifier; ``norms`` is the number of norms
    with running statistics; ``stages`` has the channels, the reduction and the module of each stage.
    """
    sizes: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("network_sizes.json").read_text())
    return sizes


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Return whether ``name`` names a repository on the Hugging Face Hub, right or wrong."""
    return os.fspath(name).startswith(HUB_PREFIX)


def which_have(option: str) -> str:
    """Return a clause for messages with the families that have an option; empty if none has."""
    have = [each.family for each in ARCHITECTURES.values() if option in each.options.model_fields]
    return f"; networks with {option}: {join_names(dict.fromkeys(have), len(have))}" if have else ""


# The packages whose networks are known by names such as "torchvision:resnet50", see `zoo.models.external`.
NETWORK_PACKAGES = ("timm", "torchvision")
HUB_PREFIX = "hf-hub:"  # the beginning of the name of a repository on the Hugging Face Hub
# The value of "memory" that every network has: "auto", and recipes in place of activations (`zoo.lean`).
LEAN = "lean"
# The values that networks of other packages have; "auto" is "plain" there.
EXTERNAL_MEMORY = ("auto", "plain", LEAN)


def _family(
    family: str,
    networks: Mapping[str, Mapping[str, Any]],
    *,
    memory: tuple[str, ...] = ("auto", "plain"),
    options: type[Section] = Section,
    dilations: Mapping[int, Any] | None = None,
    **others: Any,
) -> dict[str, Architecture]:
    """Return the architectures of a family; ``networks`` maps names to structures."""
    return {
        name: Architecture(name, family, structure, options, (*memory, LEAN), dilations or {}, **others)
        for name, structure in networks.items()
    }


# The dilations of mod2 to mod5 for strides 32, 16 and 8 of the last feature map.
_DILATIONS = {32: 1, 16: [1, 1, 1, 2], 8: [1, 1, 2, 4]}
CHECKPOINTED = ("auto", "plain", "checkpoint")
_WIDER = {"16": (1, 1, 1, 1, 1, 1), "20": (1, 1, 1, 3, 1, 1), "38": (3, 3, 6, 3, 1, 1)}
_REVNET_WIDTHS = (128, 128, 256, 512, 832)

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
        options=ResNetOptions,
        memory=CHECKPOINTED,
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
        options=ResNeXtOptions,
        memory=CHECKPOINTED,
        dilations=_DILATIONS,
    ),
    **_family(
        "wider_resnet",
        {f"wider_resnet{depth}": {"structure": structure} for depth, structure in _WIDER.items()},
        options=StochasticDepth,
        memory=CHECKPOINTED,
        ignores_input_3x3=True,
    ),
    **_family(
        "wider_resnet_a2",
        {f"wider_resnet{depth}_a2": {"structure": structure} for depth, structure in _WIDER.items()},
        options=WiderResNetA2Options,
        memory=CHECKPOINTED,
        dilations={32: False, 16: [1, 1, 2, 2], 8: True},
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
        options=DenseNetOptions,
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
        options=StochasticDepth,
        memory=CHECKPOINTED,
        input="cifar",
    ),
    **_family(
        "preact",
        {"resnet101_preact": {"structure": (3, 4, 23, 3), "widths": (64, 64, 128, 256, 512), "bottleneck": True}},
        options=StochasticDepth,
        memory=CHECKPOINTED,
    ),
    **_family(
        "revnet",
        {
            "revnet38_cifar": {"structure": (3, 3, 3), "widths": (32, 32, 64, 112), "bottleneck": False},
            "revnet110_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": False},
            "revnet164_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": True},
        },
        options=ReversibleOptions,
        input="cifar",
    ),
    **_family(
        "revnet",
        {
            "revnet56": {"structure": (2, 2, 3, 2), "widths": _REVNET_WIDTHS, "bottleneck": True},
            # 45,428,072 parameters; 45.2 M in the paper
            "revnet104": {"structure": (2, 2, 11, 2), "widths": _REVNET_WIDTHS, "bottleneck": True},
        },
        options=ReversibleOptions,
    ),
    **_family(
        "irevnet",
        {"irevnet_cifar": {}},
        options=IRevNetOptions,
        input="cifar",
    ),
    **_family(
        "irevnet_two_branch",
        {"irevnet_revnext": {"blocks": (2, 2, 2, 1), "channels": 32}},
        options=ReversibleOptions,
        input="cifar",
    ),
    **_family(
        "revnext",
        {"revnext": {}},
        options=RevNeXtOptions,
        input="cifar",
    ),
    **_family(
        "revnext_flat",
        {"revnext_flat": {}},
        options=FlatRevNeXtOptions,
        input="cifar",
    ),
    **_family(
        "revnext_baseline",
        {"revnext_resnet18": {"reversible": False, "blocks": (2, 2, 2, 2), "channels": 32, "grid_bits": None}},
        input="cifar",
    ),
    **_family(
        "revnext_baseline",
        {"revnext_revnet": {"reversible": True, "blocks": (4, 4, 4, 4), "channels": 32}},
        options=ReversibleOptions,
        input="cifar",
    ),
    **_family(
        "revvit",
        {
            "revvit_s": {"structure": (12,), "width": 384, "heads": 6, "patch": 16, "image_size": 224},
            "revvit_b": {"structure": (12,), "width": 768, "heads": 12, "patch": 16, "image_size": 224},
        },
        options=RevViTOptions,
        has_own_layers=True,
    ),
    **_family(
        "revbifpn",
        {
            f"revbifpn_s{size}": {
                "channels": channels,
                "head_channels": head_channels,
                "features": features,
                "extra_stages": extra_stages,
            }
            for size, (channels, head_channels, features, extra_stages) in enumerate(
                [
                    ((48, 64, 80, 160), (48, 64, 128, 320), 1280, 2),
                    ((64, 80, 96, 208), (64, 80, 160, 416), 1696, 2),
                    ((96, 128, 160, 320), (96, 128, 256, 640), 2560, 2),
                    ((128, 160, 208, 416), (128, 160, 336, 848), 3408, 3),
                    ((192, 256, 320, 640), (192, 256, 512, 1280), 5120, 4),
                    ((256, 336, 416, 848), (256, 336, 672, 1696), 6816, 4),
                    ((320, 416, 528, 1056), (320, 416, 848, 2128), 8528, 5),
                ]
            )
        },
        options=RevBiFPNOptions,
        has_own_layers=True,
    ),
    **_family(
        "revcol",
        {
            "revcol_tiny": {"structure": (2, 2, 4, 2), "channels": (64, 128, 256, 512), "columns": 4},
            "revcol_small": {"structure": (2, 2, 4, 2), "channels": (64, 128, 256, 512), "columns": 8},
            "revcol_base": {"structure": (1, 1, 3, 2), "channels": (72, 144, 288, 576), "columns": 16},
            "revcol_large": {"structure": (1, 2, 6, 2), "channels": (128, 256, 512, 1024), "columns": 8},
        },
        options=StochasticDepth,
        memory=CHECKPOINTED,
        made_lean="plain",  # reconstruction would not be exact
        has_own_layers=True,
    ),
}


def _deeplab(body: Architecture) -> Architecture:
    """Return DeepLabV3 on ``body``, with the memory strategies and the stem of the body."""
    return Architecture(
        f"deeplab_{body.name}",
        "deeplab",
        {"body": body.name},
        DeepLabStemOptions if issubclass(body.options, StemOptions) else DeepLabOptions,
        body.memory,
        dilations={},  # the option output_stride dilates the body
        task="segmentation",
        ignores_input_3x3=body.ignores_input_3x3,
    )


def _pyramid(body: Architecture) -> Architecture:
    """Return the network with the head of HRNetV2 on ``body``."""
    return replace(
        body, name=f"pyramid_{body.name}", family="pyramid", structure={"body": body.name}, task="segmentation"
    )


ARCHITECTURES |= {
    arch.name: arch
    for arch in [
        *(_deeplab(body) for body in ARCHITECTURES.values() if 8 in body.dilations),
        *(_pyramid(body) for body in ARCHITECTURES.values() if body.family == "revbifpn"),
    ]
}

# ResNet -> its RevNet counterpart in Gomez et al. 2017, Table 2.
REVERSIBLE_TWINS = {
    "resnet32_cifar": "revnet38_cifar",
    "resnet110_cifar": "revnet110_cifar",
    "resnet164_cifar": "revnet164_cifar",
    "resnet101_preact": "revnet104",
}
