"""Networks of other packages, by names such as "timm:efficientnet_b0" and "torchvision:resnet50"."""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config.architectures import EXTERNAL_MEMORY, LEAN, NETWORK_PACKAGES
from zoo.config.record import Preprocessing
from zoo.config.section import parse_section
from zoo.errors import ConfigError, join_names, nearest, truncate
from zoo.remat._lean import lean
from zoo.tables import counted
from zoo.torch_internals.data import tree_leaves

logger = logging.getLogger(__name__)


def split_name(name: str) -> tuple[str, str] | None:
    """Split "PACKAGE:NAME" into package and name; return None for the name of a network of zoo."""
    package, colon, own_name = name.partition(":")
    return (package, own_name) if colon else None


def list_networks(pattern: str) -> list[str]:
    """Return the names that match a shell-style pattern such as "timm:resnet*"; raise ConfigError if none does.

    Tags of timm's weights, as in "timm:resnet50.a1_in1k", are accepted in whole names only.
    """
    found = split_name(pattern)
    if found is None:
        raise ConfigError(
            f"{pattern!r} does not begin with the name of a package: {join_names(f'{p}:' for p in NETWORK_PACKAGES)}"
        )
    package, own_pattern = found
    names = _names(package)
    matching = [f"{package}:{name}" for name in names if fnmatch.fnmatchcase(name, own_pattern)]
    if not matching and package == "timm" and own_pattern in import_module("timm").list_pretrained():
        return [pattern]  # a name with the tag of timm's weights
    if not matching:
        listing = "timm.list_models()" if package == "timm" else "torchvision.models.list_models()"
        hint = nearest(own_pattern, names, f"{listing} returns all")
        raise ConfigError(f"{package} has no network called {own_pattern!r}", remedy=hint)
    return matching


def similar_names(name: str) -> list[str]:
    """Return the networks of other packages that ``name`` may mean, as "PACKAGE:NAME".

    First come the networks with this name, ignoring underscores, then at most three per package whose names begin with
    it. Packages that are not installed are skipped.
    """
    same: list[str] = []
    longer: list[str] = []
    for package in NETWORK_PACKAGES:
        names = _names(package) if find_spec(package) is not None else []
        starting = [each for each in names if name and squeezed(each).startswith(squeezed(name))]
        equal = [each for each in starting if squeezed(each) == squeezed(name)]
        same += [f"{package}:{each}" for each in equal]
        longer += [f"{package}:{each}" for each in sorted(starting, key=len)[:3] if not equal]
    return same + longer


def squeezed(name: str) -> str:
    """Return a name in lower case and without underscores and hyphens, because packages place them differently."""
    return name.lower().replace("_", "").replace("-", "")


def smallest_of_each_family(names: Sequence[str]) -> list[str]:
    """Return the network with the fewest parameters of each family.

    Names with the same first word, up to a digit or an underscore, form a family. Parameters are counted on the meta
    device; the first network wins a tie. A network that cannot be built there is returned only if its family has no
    other.
    """
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        package, _, own_name = name.partition(":")
        word = re.match(r"[a-z]+", own_name)
        families.setdefault(f"{package}:{word[0] if word else own_name}", []).append(name)
    return [min(family, key=_num_parameters) if len(family) > 1 else family[0] for family in families.values()]


def build_external(
    name: str, *, num_classes: int | None = None, pretrained: bool = False, memory: str = "auto", **options: Any
) -> nn.Module:
    """Build a network of another package; the package initializes it.

    Args:
    - `name`: "PACKAGE:NAME".
    - `num_classes`: number of classes; default: the package's. 0: no classifier (timm only).
    - `pretrained`: let the package download and load its weights. A classifier for another number of classes is newly
      initialized.
    - `memory`: "lean" applies `zoo.lean`; "auto" and "plain" leave the network unchanged.
    - `**options`: further arguments of the package's builder.

    Raises ConfigError for an unknown package or name, a package that is not installed, arguments that the builder
    rejects, and weights that the package cannot load.
    """
    if memory not in EXTERNAL_MEMORY:
        raise ConfigError(f"{name}: memory = {memory!r}: should be one of {join_names(EXTERNAL_MEMORY)}")
    if name not in (found := list_networks(name)):
        raise ConfigError(f"{name!r} is a pattern, not the name of a network; it matches {join_names(found)}")
    package, _, own_name = name.partition(":")
    if num_classes == 0 and package == "torchvision":
        raise ConfigError(
            f"num_classes = 0: torchvision cannot build {own_name} without classifier; build it with one, and replace "
            "that by torch.nn.Identity()"
        )
    if num_classes is not None:
        options["num_classes"] = num_classes
    try:
        if package == "timm":
            model = import_module("timm").create_model(own_name, pretrained=pretrained, **options)
        else:
            models = import_module("torchvision.models")
            if "weights_backbone" in signature(models.get_model_builder(own_name)).parameters:
                options["weights_backbone"] = None
            model = models.get_model(own_name, weights=None, **options)
            if pretrained:
                # torchvision loads weights only into a classifier with their number of classes.
                weight_options = {key: value for key, value in options.items() if key != "num_classes"}
                model = _with_classifier_of(models.get_model(own_name, weights="DEFAULT", **weight_options), model)
    except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(f"{name} cannot be built: {error}") from error
    assert isinstance(model, nn.Module)
    if (
        pretrained
        and num_classes is not None
        and num_classes != (known := _count_pretrained_classes(package, own_name))
    ):
        logger.warning(
            "%s: the classifier of its weights has %s and the network %d: the network keeps its initial classifier",
            name, counted(known, "class"), num_classes,
        )  # fmt: skip
    return lean(model) if memory == LEAN else model


def _count_pretrained_classes(package: str, name: str) -> int:
    """Return the number of classes of the weights that a package has for a network."""
    if package == "timm":
        return int(import_module("timm").get_pretrained_cfg(name).num_classes)
    return len(import_module("torchvision.models").get_model_weights(name).DEFAULT.meta["categories"])


def _with_classifier_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Replace the layers of ``model`` whose shapes differ from ``other`` (the classifier) by the other's layers."""
    for name, layer in list(model.named_modules()):
        shapes = [parameter.shape for parameter in layer.parameters(recurse=False)]
        if shapes and shapes != [each.shape for each in other.get_submodule(name).parameters(recurse=False)]:
            model.set_submodule(name, other.get_submodule(name))
    return model


def image_shape(name: str, size: int) -> tuple[int, int, int]:
    """Return the channels, height and width of images for a network, preferably of ``size`` x ``size`` pixels.

    For a network with a fixed input size returns that size; for a network with a larger minimum, the minimum.
    """
    (full_name,) = list_networks(name)
    package, _, own_name = full_name.partition(":")
    channels, least = 3, 1
    if package == "timm":
        settings = import_module("timm").get_pretrained_cfg(own_name).to_dict()
        channels, *own_size = settings["input_size"]
        if settings.get("fixed_input_size"):
            return (channels, *own_size)
        least = max(settings.get("min_input_size") or (least,))
    else:
        weights = import_module("torchvision.models").get_model_weights(own_name)
        least = min((max(each.meta["min_size"]) for each in weights if "min_size" in each.meta), default=least)
    return channels, max(size, least), max(size, least)


def own_preprocessing(name: str, sha256: str | None = None) -> Preprocessing:
    """Return the preprocessing that belongs to the weights of a classification network of another package.

    timm describes it in ``pretrained_cfg``, with its test size. A tag in the name selects the weights, as in
    "timm:resnet50.a1_in1k"; without a tag they are timm's default. torchvision describes it in
    ``weights.transforms()``, for the weights whose file has the digest ``sha256``, otherwise for its default weights. A
    network without a description gets the default preprocessing. Raises ConfigError for a description that zoo does not
    support.
    """
    package, _, own_name = name.partition(":")
    _names(package)  # raises if the package is not installed
    content = (_preprocessing_of_timm if package == "timm" else _preprocessing_of_torchvision)(own_name, sha256)
    return parse_section(Preprocessing, content, f"the preprocessing of {name}")


def _preprocessing_of_timm(name: str, sha256: str | None) -> dict[str, Any]:
    settings = import_module("timm").get_pretrained_cfg(name)
    if settings is None:
        return {}
    found = read_timm_preprocessing(settings.to_dict())
    if found is None:
        what = f"input_size = {settings.input_size}, crop_pct = {settings.crop_pct}, crop_mode = {settings.crop_mode}"
        raise ConfigError(f"{what}: only square color images that fill the crop are supported", f"timm:{name}")
    return found


def read_timm_preprocessing(cfg: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the preprocessing in a ``pretrained_cfg`` of timm, with timm's test size.

    Returns None unless images are square, in color, and fill the crop. Does not check other values, because the content
    may come from a file. Raises ConfigError if timm is not installed.
    """
    _names("timm")
    found = import_module("timm.data").resolve_data_config(pretrained_cfg=cfg, use_test_size=True)
    match found["input_size"], found["crop_pct"]:
        case [3, int(height), int(width)], float() | int() as crop_pct if (
            height == width > 0 and 0.01 < crop_pct <= 1 and found["crop_mode"] != "border"
        ):
            scale = math.floor(height / crop_pct)
        case _:
            return None
    return {
        "scale_val": scale,
        "crop_val": height,
        "interpolation_val": found["interpolation"],
        "crop_mode_val": found["crop_mode"],
        **{key: list(found[key]) if isinstance(found[key], tuple) else found[key] for key in ("mean", "std")},
    }


def _preprocessing_of_torchvision(name: str, sha256: str | None) -> dict[str, Any]:
    known = list(import_module("torchvision.models").get_model_weights(name))
    if not known:
        return {}
    # Names of torchvision's files end in the first digits of their SHA-256.
    own = [weights for weights in known if sha256 and weights.url.endswith(f"-{sha256[:8]}.pth")]
    found = (own or [type(known[0]).DEFAULT])[0].transforms()
    if not hasattr(found, "crop_size"):
        return {}
    return {
        "scale_val": found.resize_size[0],
        "crop_val": found.crop_size[0],
        "mean": found.mean,
        "std": found.std,
        "interpolation_val": found.interpolation.value,
    }


def check_logits(model: nn.Module, name: str, num_classes: int, side: int, setting: str) -> None:
    """Raise ConfigError unless a network returns logits (N, classes) for square images.

    The network is on the meta device, so nothing is computed. Does not check a network whose forward pass needs values.

    Args:
    - `name`: name of the network in messages.
    - `side`: height and width of the images, px.
    - `setting`: key of the image size in messages.
    """
    images = torch.empty(2, 3, side, side, device="meta")
    try:
        with torch.no_grad():
            output = model(images)
    except Exception as error:  # another package's forward may raise anything
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return
        reason = truncate(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise ConfigError(
            f"{setting} = {side}: {name} cannot be run on images of {side} x {side} px ({reason}); set the input size "
            "of the network, or pass its builder this size in network.options"
        ) from error
    if not isinstance(output, Tensor) or output.shape != (2, num_classes):
        found = (
            f"the shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"an object {type(output).__name__}"
        )
        auxiliary = '; network.options {"aux_logits": false} removes auxiliary ones' * isinstance(output, tuple)
        raise ConfigError(
            f"network.arch = {name}: returns {found} for two images; training and scoring need logits of the shape "
            f"(2, {num_classes}){auxiliary}"
        )


def iter_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a network's output: a tensor, or lists and dictionaries of them."""
    return (each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point())


def _names(package: str) -> list[str]:
    if package not in NETWORK_PACKAGES:
        raise ConfigError(f"{package!r} is not a supported package; use one of {join_names(NETWORK_PACKAGES)}")
    if find_spec(package) is None:
        raise ConfigError(f"networks of {package} need that package: pip install {package}")
    names = (
        import_module("timm").list_models() if package == "timm" else import_module("torchvision.models").list_models()
    )
    return list(names)


def _num_parameters(name: str) -> float:
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build_external(name).parameters())
    except Exception:  # another package may raise anything
        return float("inf")
