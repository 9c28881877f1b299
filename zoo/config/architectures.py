"""The index of networks: static facts about each architecture, its options and its sizes. Does not import torch.

The files of the families define the facts, see `zoo.models.family.family`. ``python -m tests.golden`` writes them to
the index, networks.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from zoo.config.schema import section_of
from zoo.config.section import Section
from zoo.errors import ConfigError, join_names, nearest


@dataclass(frozen=True)
class Architecture:
    """Static facts about one network.

    Args:
    - `name`: the name in `zoo.get` and experiment files.
    - `family`: the class that builds the network, a key of `zoo.models.family.FAMILIES`.
    - `module`: the module that defines the class.
    - `structure`: fixed arguments of that class, such as the blocks per stage.
    - `options`: the section of the arguments that a user may choose.
    - `memory`: the values of the argument "memory", which every network has.
    - `dilations`: stride of the last feature map -> value of the option "dilation" that produces it; empty if the
      stride is fixed.
    - `input`: "imagenet" (224 pixels, 1000 classes) or "cifar" (32 pixels, 10 classes).
    - `task`: "classification" (logits of an image) or "segmentation" (logits of each pixel; 19 classes, as Cityscapes).
    - `ignores_input_3x3`: whether experiment files may set input_3x3 without effect, like the original project's files
      of a WiderResNet and a ResNet-34.
    - `made_lean`: the value of "memory" to build the network with before `zoo.lean`, for the value "lean".
    - `fixed_layers`: whether norms, activation and initial weights are fixed; specs then have no settings for them.
    """

    name: str
    family: str
    module: str
    structure: Mapping[str, Any]
    options: type[Section]
    memory: tuple[str, ...]
    dilations: Mapping[int, Any]
    input: Literal["imagenet", "cifar"] = "imagenet"
    task: Literal["classification", "segmentation"] = "classification"
    ignores_input_3x3: bool = False
    made_lean: str = "auto"
    fixed_layers: bool = False

    @property
    def num_classes(self) -> int:
        """The default number of classes."""
        if self.task == "segmentation":
            return 19
        return 1000 if self.input == "imagenet" else 10


def architecture(name: str) -> Architecture:
    """Return the facts about the network ``name``. Raises ConfigError, with the nearest names, if it is unknown."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown network {name!r}", remedy=nearest(name, ARCHITECTURES, "zoo list shows all"))
    return ARCHITECTURES[name]


def network_sizes() -> dict[str, dict[str, Any]]:
    """Return the sizes of each architecture with its default options, and of ``NAME+input_3x3`` with that stem.

    ``parameters`` is the number of parameters, ``headless`` the number without the classifier, ``norms`` the number of
    norms with running statistics. ``stages`` has the channels, the reduction and the module of each stage. Families
    outside the index are missing.
    """
    sizes: dict[str, dict[str, Any]] = read_index()["sizes"]
    return sizes


@cache
def read_index() -> dict[str, dict[str, Any]]:
    """Return the content of the index: options of families, architectures, sizes, and names of published weights."""
    index: dict[str, dict[str, Any]] = json.loads(INDEX.read_text())
    return index


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Return whether ``name`` has the form of a repository on the Hugging Face Hub, valid or not."""
    return os.fspath(name).startswith(HUB_PREFIX)


def which_have(option: str) -> str:
    """Return a clause for messages that names the families with an option; "" if there are none."""
    have = [each.family for each in ARCHITECTURES.values() if option in each.options.model_fields]
    return f"; networks with {option}: {join_names(dict.fromkeys(have), len(have))}" if have else ""


INDEX = Path(__file__).with_name("networks.json")
# The packages whose networks are known by names such as "torchvision:resnet50", see `zoo.models.external`.
NETWORK_PACKAGES = ("timm", "torchvision")
HUB_PREFIX = "hf-hub:"  # prefix of the names of repositories on the Hugging Face Hub
# Value of "memory" that every network supports: like "auto", with `zoo.lean` applied.
LEAN = "lean"
# Values of "memory" that networks of other packages support; "auto" means "plain" there.
EXTERNAL_MEMORY = ("auto", "plain", LEAN)


def _read_architectures() -> dict[str, Architecture]:
    index = read_index()
    options = {name: section_of(schema) for name, schema in index["options"].items()}
    records = {}
    for name, facts in index["architectures"].items():
        dilations = {int(stride): dilation for stride, dilation in facts["dilations"].items()}
        changed = {"options": options[facts["options"]], "memory": tuple(facts["memory"]), "dilations": dilations}
        records[name] = Architecture(name, **{**facts, **changed})
    return records


ARCHITECTURES = _read_architectures()
BUNDLED = frozenset(ARCHITECTURES)  # the architectures of this package; imported families of users add others
