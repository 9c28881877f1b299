"""Builds any network of `zoo.architectures` by its name: the one place where an architecture becomes a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.architectures import LEAN, NEEDS_INPLACE, SIZES, Architecture, architecture, check_option
from zoo.errors import ConfigError, listed, nearest
from zoo.layers.norm import InPlaceABN, InPlaceABNSync, NormFactory, norm_act
from zoo.limits import MAX_PARAMETERS, MAX_TOTAL_DEPTH
from zoo.models.base import Network, check_classes
from zoo.models.deeplab import HEAD_DILATIONS, DeepLab
from zoo.models.densenet import DenseNet
from zoo.models.irevnet import IRevNet
from zoo.models.preact import PreactResNet
from zoo.models.resnet import ResNet
from zoo.models.resnext import ResNeXt
from zoo.models.revnet import RevNet
from zoo.models.revnext import FlatRevNeXt, RevNeXt
from zoo.models.revnext_baselines import RevNeXtBaseline, TwoBranchIRevNet
from zoo.models.wider_resnet import WiderResNet, WiderResNetA2
from zoo.remat.lean import lean


def _deeplab(
    norm: NormFactory,
    classes: int,
    *,
    body: str,
    features_only: bool,
    output_stride: int | None,
    dilation: Any,
    head_dilations: Sequence[int] | None,
    pooling_size: int | Sequence[int] | None,
    **of_body: Any,
) -> DeepLab:
    """Return DeepLabV3 on the architecture ``body``, with the options ``of_body``.

    The body is dilated for ``output_stride``, by default 8, or as ``dilation`` says. Raises ConfigError for both, for a
    dilation that gives another stride than 8 or 16, and for features.
    """
    record = architecture(body)
    if features_only:
        raise ConfigError(
            "features_only: DeepLab makes logits of one map, and has no list of features; take those of its body: "
            f"zoo.get({body!r}, features_only=True, output_stride={output_stride or 8})"
        )
    if dilation is None:
        dilation = record.dilations[output_stride or 8]
    elif output_stride is not None:
        raise ConfigError("output_stride and dilation say the same; give one")
    network = FAMILIES[record.family](
        norm, 0, **record.structure, **{**record.options, **of_body, "dilation": dilation}
    )
    stride = network.feature_info.reduction()[-1]
    if stride not in HEAD_DILATIONS:
        raise ConfigError(
            f"dilation = {dilation!r}: makes the map of {body} {stride} times smaller than the image, and the head "
            "needs 8 or 16; give output_stride instead"
        )
    return DeepLab(
        norm,
        classes,
        body=network,
        head_dilations=head_dilations or HEAD_DILATIONS[stride],
        pooling_size=pooling_size,
    )


# The class of each family: (norm, classes, *, features_only, **structure and options) -> network.
FAMILIES: dict[str, Callable[..., Network]] = {
    "resnet": ResNet,
    "resnext": ResNeXt,
    "wider_resnet": WiderResNet,
    "wider_resnet_a2": WiderResNetA2,
    "densenet": DenseNet,
    "preact": PreactResNet,
    "revnet": RevNet,
    "irevnet": IRevNet,
    "irevnet_two_branch": TwoBranchIRevNet,
    "revnext": RevNeXt,
    "revnext_flat": FlatRevNeXt,
    "revnext_baseline": RevNeXtBaseline,
    "deeplab": _deeplab,
}

# Names of arguments in timm, torchvision and other packages -> what to use here.
_NO_SUCH = "there is no such thing here; leave it out"
OTHER_NAMES = {
    "checkpoint_path": "it is called weights here",
    **dict.fromkeys(
        ("weights_backbone", "pretrained_backbone", "backbone_weights", "encoder_weights"),
        "weights for the body of a deeplab_* network are called body_weights here, the path of a file or a published "
        "name",
    ),
    **dict.fromkeys(("aux_loss", "aux_params"), "the networks have one head, and no auxiliary one"),
    "act_layer": "it is called activation here, a word: 'leaky_relu', 'elu', 'identity' or 'relu'",
    "norm_layer": "it is called norm here: 'standard', 'inplace', 'sync' or a function channels -> module",
    "in_channels": "it is called in_chans here",
    "replace_stride_with_dilation": "it is called output_stride here (or dilation, a number per module)",
    "dropout_rate": "it is called drop_rate here",
    "drop": "it is called drop_rate here",
    "zero_init_last": _NO_SUCH,
    "zero_init_residual": _NO_SUCH,
    "drop_path_rate": _NO_SUCH,
    "drop_block_rate": _NO_SUCH,
    "global_pool": (
        "the pooling is the network's own; forward_features returns the map before it, and features_only=True makes "
        "forward return the maps of all stages"
    ),
    "pretrained_cfg": "the network gets it as an attribute, model.pretrained_cfg, which you can change there",
    "pretrained_cfg_overlay": "the network gets model.pretrained_cfg, which you can change there",
    "cache_dir": "the environment variable ZOO_CACHE names the cache",
    "progress": "downloads show a bar where there is a terminal",
    "scriptable": "TorchScript is not supported; torch.export is",
    "exportable": "every network can be exported with torch.export; leave it out",
    "stem_type": "it is called input_3x3 here, True or False",
    "img_size": "the networks take images of any size; leave it out",
}
# The arguments of all networks, which may be meant by the unknown name of an option.
COMMON_ARGUMENTS = (
    "pretrained", "weights", "norm", "activation", "activation_param", "num_classes", "classes", "features_only",
    "out_indices", "output_stride", "in_chans", "drop_rate", "signed_scale", "body_weights",
)  # fmt: skip


def build_network(
    arch: str,
    norm: NormFactory,
    *,
    classes: int | None = None,
    features_only: bool = False,
    structure: Sequence[int] | None = None,
    **options: Any,
) -> Network:
    """Return a network whose convolutions and classifier have no values yet (`zoo.layers.init_weights` sets them).

    Under ``torch.device("meta")`` nothing is allocated.

    Args:
    - `arch`: name of an architecture.
    - `norm`: function channels -> norm with its activation, as `zoo.layers.norm_act` returns it.
    - `classes`: outputs of the classifier, 0 for none; default the architecture's.
    - `features_only`: leave the classifier out; forward returns the list of the stages' outputs.
    - `structure`: blocks per stage in place of the architecture's own, as many numbers as it has.
    - `**options`: options of the architecture (`zoo.architectures`); those that are left out have their defaults.

    Raises ConfigError for an unknown architecture or option, for values that an option cannot have, alone or together
    with the others, and for a ``memory`` that needs other norms.
    """
    record = architecture(arch)
    classes = record.classes if classes is None else classes
    check_classes(classes)
    check_options(record, options, norm)
    arguments = {**record.structure, **record.options, **options}
    if structure is not None:
        arguments["structure"] = _checked_structure(record, structure)
    is_lean = arguments["memory"] == LEAN
    if is_lean:
        arguments["memory"] = "auto"

    def build(factory: NormFactory) -> Network:
        return FAMILIES[record.family](factory, classes, features_only=features_only, **arguments)

    try:
        _check_size(record, options, build)
        network = build(norm)
    except ValueError as error:
        raise ConfigError(f"{arch}: {error}") from error
    return lean(network) if is_lean else network


def check_options(record: Architecture, options: Mapping[str, Any], norm: NormFactory) -> None:
    """Raise ConfigError for options that the architecture does not have, and for values that it cannot have.

    The way to save memory has to be one that the architecture has, and to fit the norms that ``norm`` makes. Sizes are
    not checked: `build_network` does that.
    """
    check_option_names(record, options)
    for option, value in options.items():
        try:
            check_option(option, value)
        except ConfigError as error:
            raise ConfigError(f"{record.name}: {error}") from error
    _check_memory(record, options.get("memory", "auto"), norm)


def _check_memory(record: Architecture, memory: Any, norm: NormFactory) -> None:
    """Raise ConfigError unless the architecture has this way to save memory, and ``norm`` makes norms that fit it."""
    if memory not in record.memory:
        raise ConfigError(f"memory must be one of {', '.join(record.memory)}, got {memory!r}")
    if memory in NEEDS_INPLACE and type(layer := norm(1)) not in (InPlaceABN, InPlaceABNSync):
        raise ConfigError(
            f"memory={memory!r} needs norms that work in place, not {type(layer).__name__}; build the network with "
            'norm="inplace" or "sync", or with memory="auto"'
        )


def depth_of(record: Architecture, options: Mapping[str, Any]) -> int:
    """Return the number of blocks or layers, all with weights, that the options ask for; 0 if no option sets it."""
    options = {**record.options, **options}
    return int(sum(options.get("blocks", options.get("layers", ()))) * options.get("units", 1))


def check_option_names(record: Architecture, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is no option of the architecture; the message suggests what may be meant."""
    for option in names:
        if option not in record.options:
            hint = OTHER_NAMES.get(option)
            if option in COMMON_ARGUMENTS:
                hint = "it is an argument of zoo.get in Python, and no setting of an experiment"
            elif hint is None:
                hint = f"the nearest argument is {nearest(option, [*record.options, *COMMON_ARGUMENTS], 1)[0]!r}"
            known = listed(record.options)
            raise ConfigError(f"{record.name} has no option {option!r}; its options are {known}; {hint}")


def _checked_structure(record: Architecture, structure: Sequence[int]) -> Sequence[int]:
    if "structure" not in record.structure:
        raise ConfigError(f"{record.name} has no structure of blocks per stage to change")
    num_stages = len(record.structure["structure"])
    if len(structure) != num_stages:
        raise ConfigError(f"{record.name} has {num_stages} stages, the structure {structure} is of other length")
    return structure


def _check_size(record: Architecture, options: Mapping[str, Any], build: Callable[[NormFactory], nn.Module]) -> None:
    """Raise ConfigError for sizes among ``options`` that are allowed one by one, but too large together.

    The parameters of what ``build`` returns are counted on the meta device, where nothing is allocated; the depth is
    checked first, because building a network of a million blocks takes hours even there. If no option sets a size,
    nothing is built.
    """
    if options.keys().isdisjoint(SIZES):
        return
    depth = depth_of(record, options)
    if depth > MAX_TOTAL_DEPTH:
        raise ConfigError(
            f"{record.name} would have {depth:,} layers or blocks, more than {MAX_TOTAL_DEPTH:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
    try:
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in build(norm_act("standard")).parameters())
    except (TypeError, OverflowError, RuntimeError) as error:  # torch's, of sizes that no tensor can have
        raise ConfigError(f"{record.name} cannot be built with the options {dict(options)} ({error})") from error
    if num_parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"{record.name} would have {num_parameters:,} parameters, more than {MAX_PARAMETERS:,}, with the options "
            f"{dict(options)}; make them smaller"
        )
