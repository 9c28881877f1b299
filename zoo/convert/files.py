"""Converts weights files, by their own descriptions of their networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo import convert
from zoo.convert.conversion import ConversionReport, build_with_weights
from zoo.convert.export import export
from zoo.convert.fold import fold_and_compare
from zoo.convert.norms import convert_network
from zoo.errors import ConfigError, ConversionError, escape
from zoo.files import replacing
from zoo.models.build import build_model
from zoo.models.external import build_external, image_shape
from zoo.spec import NetworkSpec, Preprocessing, merge, parse_spec
from zoo.weights import StoredWeights, load_state_dict, read_weights
from zoo.weights.load import num_outputs
from zoo.weights.stored import check_fits_spec
from zoo.weights.stored_spec import check_same_network

DEFAULT_SLOPE = 0.01  # of leaky_relu
RELU = {"norm": "standard", "activation": "relu"}
# Kind of conversion -> settings that the network of its source must have.
SOURCES: dict[str, dict[str, str]] = {
    "from-torchvision": RELU,
    "to-torchvision": RELU,
    "relu-to-leaky-relu": RELU,
    "inplace-to-standard": {"norm": "inplace"},
    "standard-to-inplace": {"norm": "standard"},
}
# Kind of conversion -> settings that it changes.
CHANGES: dict[str, dict[str, Any]] = {
    "relu-to-leaky-relu": {"activation": "leaky_relu"},
    "inplace-to-standard": {"norm": "standard"},
    "standard-to-inplace": {"norm": "inplace"},
    "fold": {"folded": True},
}


@dataclass(frozen=True)
class Conversion:
    """The result of `convert_file`.

    Args:
    - `source`: the file that was converted.
    - `source_spec`: the network of the file.
    - `state_dict`: the converted weights.
    - `spec`: the network of the converted weights; None for those of torchvision.
    - `report`: what was done, and how exactly.
    """

    source: StoredWeights
    source_spec: NetworkSpec
    state_dict: Mapping[str, Tensor]
    spec: NetworkSpec | None
    report: ConversionReport


def convert_file(
    kind: str,
    source: Path,
    asked: Mapping[str, Any],
    *,
    slope: float = DEFAULT_SLOPE,
    allow_approximate: bool = False,
    compare_with_source: bool = True,
) -> Conversion:
    """Return the converted weights of a file.

    Args:
    - `kind`: "from-torchvision", "to-torchvision", "relu-to-leaky-relu", "inplace-to-standard", "standard-to-inplace"
      or "fold", which are functions of `zoo.convert`.
    - `source`: path of the weights file, or a published name.
    - `asked`: settings and options of the network, which must agree with the file's description.
    - `slope`: (relu-to-leaky-relu) slope of leaky_relu.
    - `allow_approximate`: (standard-to-inplace) see `zoo.convert.standard_to_inplace`.
    - `compare_with_source`: compare the outputs of both networks.

    Raises ConfigError if nothing names the architecture, ConversionError if the conversion is not for this network, and
    WeightsError for settings that contradict the file.
    """
    stored = read_weights(source)
    if stored.spec is not None and stored.spec.is_external:
        raise ConversionError(
            f"the file holds {stored.spec.arch}, an external network, and {kind} is for those of zoo",
            source,
            "convert it with zoo convert export",
        )
    spec, changes = _source_spec(stored, kind, asked, escape(source)), CHANGES.get(kind, {})
    arguments: dict[str, Any] = {"compare_with_source": compare_with_source}
    if kind == "relu-to-leaky-relu":
        changes = {**changes, "activation_param": slope}
        arguments |= {**spec.options, "activation_param": slope}
    elif not kind.endswith("-torchvision"):  # those two report differences in their own terms
        arguments |= {**spec.options, "activation": spec.activation, "activation_param": spec.activation_param}
    if not kind.endswith("-torchvision"):
        check_fits_spec(stored.state_dict, spec, escape(source))
    if kind == "fold":
        arguments["norm"] = spec.norm
    if allow_approximate:
        arguments["allow_approximate"] = True
    try:
        state_dict, report = getattr(convert, kind.replace("-", "_"))(stored.state_dict, spec.arch, **arguments)
    except ConversionError as error:
        raise ConversionError(f"{escape(source)}: {error}") from error
    return Conversion(stored, spec, state_dict, None if kind == "to-torchvision" else spec.changed(**changes), report)


def export_file(
    source: Path,
    target: Path,
    asked: Mapping[str, Any],
    *,
    crop: int | None = None,
    compare_with_source: bool = True,
) -> tuple[ConversionReport, float]:
    """Fold the network of a weights file and write it with `zoo.convert.export`.

    The file may be a checkpoint of an external network. ``asked`` is that of `convert_file`; ``crop`` is the side of
    the images in pixels, by default that of the file's preprocessing. Returns the report of folding, and the largest
    difference of the outputs of the written file. Raises the errors of `convert_file` and `zoo.convert.export`.
    """
    stored, images = read_weights(source), None
    if stored.spec is not None and stored.spec.is_external:
        check_same_network(stored.spec, {"arch": asked.get("arch", stored.spec.arch)}, escape(source), "the options")
        spec = stored.spec.changed(**{**asked, "arch": stored.spec.arch}, memory="auto")
        size = prepare_images(spec, crop=crop).crop_val
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
        check_fits_spec(stored.state_dict, spec, escape(source))
        # Built with values: external networks may hold buffers that no file has.
        model = build_model(spec.changed(memory="plain"))
        load_state_dict(model, stored.state_dict, source=escape(source))
        model = model.double().eval()
    else:
        spec = _source_spec(stored, "export", asked, escape(source))
        check_fits_spec(stored.state_dict, spec, escape(source))
        size = prepare_images(spec, crop=crop).crop_val
        model = build_with_weights(
            stored.state_dict, spec.arch, spec.norm, spec.activation, spec.activation_param, **spec.options
        )
    try:
        folded, report = fold_and_compare(model, spec.arch, stored.state_dict, images, compare_with_source)
    except ConversionError as error:
        raise ConversionError(f"{escape(source)}: {error}") from error
    return report, export(folded, target, size, {"network": spec.model_dump(mode="json")})


def convert_external(
    name: str, *, pretrained: bool = False, size: int = 224, **options: Any
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the weights of the external network ``name`` with converted norms, and the report.

    ``options`` are those of `zoo.convert.convert_network`. The networks are compared on images of ``size`` pixels, or
    of the size that the network requires.
    """
    model = build_external(name, pretrained=pretrained)
    images = torch.randn(2, *image_shape(name, size), generator=torch.Generator().manual_seed(0))
    converted, report = convert_network(model, images=images, **options)
    return converted.state_dict(), replace(report, arch=name)


def prepare_images(spec: NetworkSpec, scale: int | None = None, crop: int | None = None) -> Preprocessing:
    """Return the preprocessing of a spec, or the default, with another scale and crop if these are given."""
    images = spec.preprocessing or Preprocessing()
    return images.model_copy(update={"scale_val": scale or images.scale_val, "crop_val": crop or images.crop_val})


def save_weights(state_dict: Mapping[str, Tensor], spec: NetworkSpec | None, path: Path) -> None:
    """Write a weights file, with the spec of its network if there is one; ConversionError if that fails."""
    content = state_dict if spec is None else {"state_dict": state_dict, "network": spec.model_dump(mode="json")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.save(content, file)
    except OSError as error:
        raise ConversionError(f"the file cannot be written ({error.strerror})", path, "give another TARGET") from error


def _source_spec(stored: StoredWeights, kind: str, asked: Mapping[str, Any], path: str) -> NetworkSpec:
    """Return the spec of the source's network: that of the file, or one made from ``asked`` and the kind.

    Its memory strategy is the default, as converted networks have other norms. Raises errors as `convert_file` does.
    """
    required, spec = SOURCES.get(kind, {}), stored.spec
    if spec is None:
        if "arch" not in asked:
            raise ConfigError(
                f"{path}: does not say which network it belongs to; give --arch NAME (resnet50), and --norm, "
                "--activation, --activation-param and --input-3x3 where they differ from the defaults"
            )
        key = "fc.weight" if kind == "from-torchvision" else None
        given = merge(asked, required, {"num_classes": num_outputs(stored.state_dict, path, key)})
        spec = parse_spec(given, path)
        stored.warn_of_assumptions(spec, given)
        return spec
    if kind == "from-torchvision":
        raise ConversionError(f"{path}: {kind} is for torchvision's files, and this is a {spec.arch} of zoo already")
    check_same_network(spec, merge(asked), path, "the options")
    for key, value in required.items():
        found = "inplace" if (key, spec.norm) == ("norm", "sync") else getattr(spec, key)
        if found != value:
            raise ConversionError(f"{path}: {kind} is for networks with {key}={value!r}, and this has {found!r}")
    return spec.changed(memory="auto")
