"""``zoo convert``: turn a weights file into that of another variant, and report what was done and how exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zoo.cli.options import (
    Command,
    DataFolder,
    LoaderOptions,
    Positive,
    WholeNumber,
    argument,
    check_writable,
    option,
)
from zoo.errors import ConfigError, ConversionError, DataError, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zoo.convert import ConversionReport
    from zoo.spec import NetworkSpec, Preprocessing
    from zoo.weights import StoredWeights

    Converted = tuple[dict[str, Tensor], ConversionReport]

DEFAULT_SLOPE = 0.01  # of leaky_relu
NETWORK_OPTIONS = ("norm", "activation", "activation_param", "input_3x3")


class Kind(NamedTuple):
    """A kind of conversion.

    Args:
    - `meaning`: what it does, for the help.
    - `source`: settings that the source must have.
    - `target`: settings that the conversion changes; None for files without a description.
    - `options`: options of the command that it takes, beside those that all kinds take.
    """

    meaning: str
    source: dict[str, Any]
    target: dict[str, Any] | None
    options: tuple[str, ...]


RELU = {"norm": "standard", "activation": "relu"}
KINDS = {
    "from-torchvision": Kind("give the weights of torchvision's ResNet this package's names", RELU, {}, ()),
    "to-torchvision": Kind("the way back", RELU, None, ()),
    "relu-to-leaky-relu": Kind(
        "the same weights for the network with leaky_relu",
        RELU, {"activation": "leaky_relu"}, ("activation_param", "input_3x3", "data"),
    ),
    "inplace-to-standard": Kind(
        "turn in-place norms into plain ones", {"norm": "inplace"}, {"norm": "standard"}, NETWORK_OPTIONS[1:]
    ),
    "standard-to-inplace": Kind(
        "turn plain norms into in-place ones",
        {"norm": "standard"}, {"norm": "inplace"}, (*NETWORK_OPTIONS[1:], "allow_approximate"),
    ),
    "norms": Kind(
        "make the norms of a network of another package work in place, and write its weights",
        {}, None, ("allow_approximate", "partial", "relu", "pretrained"),
    ),
    "fold": Kind("fold norms into the convolutions before them, for inference", {}, {"folded": True}, NETWORK_OPTIONS),
    "export": Kind(
        "fold, and write TARGET as .pt2 (torch.export) or .onnx; also checkpoints of timm:NAME, torchvision:NAME",
        {}, {}, NETWORK_OPTIONS,
    ),
}  # fmt: skip
RESTRICTED_OPTIONS = dict.fromkeys(option for kind in KINDS.values() for option in kind.options)


@dataclass(frozen=True, kw_only=True)
class Convert(Command, LoaderOptions):
    """Convert weights to another variant of their network, and report how exact the result is."""

    kind: str = argument(
        "KIND", choices=tuple(KINDS), help="; ".join(f"{name}: {kind.meaning}" for name, kind in KINDS.items())
    )
    source: Path = argument("SOURCE")
    """Weights file, checkpoint or published name; (norms) timm:NAME or torchvision:NAME."""
    target: Path | None = argument("TARGET", default=None)
    """File to write (norms: default none, report only)."""
    arch: str | None = None
    """Architecture of the weights, such as resnet50 (default: stored in SOURCE)."""
    input_3x3: bool = False
    """The network has the stem of three 3x3 convolutions."""
    activation: Literal["leaky_relu", "relu", "elu", "identity"] | None = None
    """Activation of the network (default: stored in SOURCE, or leaky_relu)."""
    activation_param: float | None = None
    """Slope of leaky_relu or alpha of elu (default: stored in SOURCE, or 0.01)."""
    norm: Literal["standard", "inplace"] | None = None
    """Norms of the network to fold (default: stored in SOURCE, or standard)."""
    allow_approximate: bool = False
    """Round scales that in-place norms cannot represent to the nearest value that they can, instead of an error."""
    partial: bool = False
    """(norms) Convert the norms that can be converted and list the others, instead of an error."""
    relu: Literal["leaky_relu"] | None = None
    """(norms) Replacement of ReLU after an in-place norm (default: ReLU is an error)."""
    pretrained: bool = False
    """(norms) Use the published weights of the package."""
    no_compare: bool = False
    """Do not compare the outputs of both networks on random images."""
    json: Path | None = None
    """Write the report to FILE."""
    overwrite: bool = False
    """Replace TARGET if it exists."""
    data: DataFolder | None = option(metavar="DIR")
    """(relu-to-leaky-relu) Data set, as a folder or the URL of shards: the accuracy before and after is measured on
    val/."""
    reestimate: WholeNumber = 0
    """(with --data) Recompute the running statistics on N batches of DIR/train; 0 keeps them."""
    batch_size: Positive = 64
    """Images per batch."""
    scale: Positive | None = option("-s", metavar="PX")
    """Shorter side before the crop (default: stored in SOURCE, or 256)."""
    crop: Positive | None = option("-c", metavar="PX")
    """Side of the crop, and of the images of an export (default: stored in SOURCE, or 224)."""

    def run(self) -> int:
        """Convert, write TARGET and the JSON file, and print the report."""
        return _run(self)


def _run(args: Convert) -> int:
    """Convert, write TARGET and the JSON file and print the report; returns 0."""
    _check_options(args)
    if args.kind == "norms":
        return _convert_network(args)
    from zoo.weights import read_weights
    from zoo.weights.stored import check_fits_spec

    stored = read_weights(args.source)
    if stored.spec is not None and stored.spec.is_external:
        return _export_external(args, stored, stored.spec)
    source = _source_spec(args, stored)
    target = _target_spec(args, source)
    if args.kind not in ("from-torchvision", "to-torchvision"):  # these report differences in their own terms
        check_fits_spec(stored.state_dict, source, printable(args.source))
    try:
        converted, report = _convert(args, stored.state_dict, source)
    except ConversionError as error:
        raise ConversionError(f"{printable(args.source)}: {error}") from error
    measured: dict[str, Any] = {}
    if args.data is not None:
        converted, report, measured = _measure_accuracy(args, source, stored.state_dict, (converted, report))
    if args.kind == "export":
        measured["exported_max_difference"] = _export(args, stored.state_dict, source)
    else:
        assert args.target is not None
        _save(converted, target, args.target)
    _print_report(args, report, measured)
    return 0


def _print_report(args: Convert, report: ConversionReport, measured: dict[str, Any]) -> None:
    """Print the report of a conversion and what was measured, and write both to the JSON file."""
    from zoo.files import write_json

    print(report)
    for name, value in measured.items():
        print(f"  {_as_line(name, value)}")
    print(f"  written: {printable(args.target)}")
    if args.json is not None:
        write_json(args.json, {**report.to_json(), **measured, "source": str(args.source), "target": str(args.target)})


def _convert_network(args: Convert) -> int:
    """Convert the norms of a network of another package, write its state dict and the report; returns 0."""
    import torch

    from zoo.convert import convert_network
    from zoo.files import write_json
    from zoo.models.external import build_external, image_shape

    model = build_external(str(args.source), pretrained=args.pretrained)
    shape = image_shape(str(args.source), args.crop or 224)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    converted, report = convert_network(
        model, partial=args.partial, relu=args.relu, allow_approximate=args.allow_approximate,
        compare_with_source=not args.no_compare, images=images,
    )  # fmt: skip
    report = replace(report, arch=str(args.source))
    print(report)
    if args.target is not None:
        _save(converted.state_dict(), None, args.target)
        print(f"  written: {printable(args.target)}")
    if args.json is not None:
        target = None if args.target is None else str(args.target)
        write_json(args.json, {**report.to_json(), "source": str(args.source), "target": target})
    return 0


def _export_external(args: Convert, stored: StoredWeights, source: NetworkSpec) -> int:
    """Export a checkpoint of a network of another package, print the report and write the JSON file; returns 0."""
    import torch

    from zoo.convert import export
    from zoo.convert.fold import fold_and_compare
    from zoo.registry import get
    from zoo.weights.stored_spec import check_same_network

    if args.kind != "export":
        raise ConversionError(
            f"{printable(args.source)}: holds {source.arch}, a network of another package, and {args.kind} is for "
            "those of zoo; zoo convert export takes it"
        )
    asked = _asked(args)
    assert args.target is not None
    check_same_network(source, {"arch": asked.pop("arch", source.arch)}, printable(args.source), "the options")
    source, size = source.changed(**asked, memory="auto"), _images(args, source).crop_val
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        model, report = fold_and_compare(
            get(args.source, memory="plain").double().eval(),
            source.arch,
            stored.state_dict,
            images,
            not args.no_compare,
        )
    except ConversionError as error:
        raise ConversionError(f"{printable(args.source)}: {error}") from error
    measured = {
        "exported_max_difference": export(model, args.target, size, {"network": source.model_dump(mode="json")})
    }
    _print_report(args, report, measured)
    return 0


def _as_line(name: str, value: Any) -> str:
    """Return a measurement as text: an accuracy, or how far the outputs of an exported file are off."""
    if isinstance(value, dict):
        top1, top5 = (f"{value[key]:.2f} ± {value['standard_errors'][key]:.2f} %" for key in ("top1", "top5"))
        return f"{name}: top-1 {top1}, top-5 {top5}, {value['count']:,} images"
    return f"the exported file, read again: largest difference {value:.2e} (float32)"


def _check_options(args: Convert) -> None:
    """Raise ConfigError for options that do not go with the kind, and for files that cannot be written."""
    for name in RESTRICTED_OPTIONS:
        if getattr(args, name) not in (None, False) and name not in KINDS[args.kind].options:
            takers = ", ".join(other for other, kind in KINDS.items() if name in kind.options)
            raise ConfigError(f"--{name.replace('_', '-')} goes with {takers}, not with {args.kind}")
    if args.reestimate and args.data is None:
        raise ConfigError("--reestimate needs images; command line: give --data DIR with train/ and val/")
    if args.target is None and args.kind != "norms":
        raise ConfigError(f"{args.kind} writes a file; command line: zoo convert {args.kind} SOURCE TARGET")
    check_writable(args.target, args.json)
    if args.target is not None and args.target.exists() and args.source.exists() and args.target.samefile(args.source):
        raise ConfigError(f"{printable(args.target)}: is the source too; give another file to write")
    if args.target is not None and os.path.lexists(args.target) and not args.overwrite:
        raise ConfigError(
            f"{printable(args.target)}: exists already; give another TARGET, or --overwrite to replace it"
        )


def _asked(args: Convert) -> dict[str, Any]:
    """Return the settings of the source's network that were given as options."""
    keys = ("arch", *NETWORK_OPTIONS)
    asked = {key: value for key in keys if (value := getattr(args, key)) not in (None, False)}
    if args.kind == "relu-to-leaky-relu":
        asked.pop("activation_param", None)  # this option is about the target
    return asked


def _source_spec(args: Convert, stored: StoredWeights) -> NetworkSpec:
    """Return the spec of the source's network: that of the file, or one made from the options and the kind.

    Its memory strategy is the default, as converted networks have other norms. Raises ConfigError if nothing names the
    architecture, ConversionError for a kind that is not for this network, and WeightsError for options that contradict
    the file.
    """
    from zoo.spec import merge, parse_spec
    from zoo.weights.load import num_outputs
    from zoo.weights.stored_spec import check_same_network

    path, kind, spec, asked = printable(args.source), KINDS[args.kind], stored.spec, _asked(args)
    if spec is None:
        if args.arch is None:
            others = [f"--{key.replace('_', '-')}" for key in NETWORK_OPTIONS if key in kind.options]
            raise ConfigError(
                f"{path}: does not say which network it belongs to; give --arch NAME (resnet50)"
                + (f", and {', '.join(others)} where they differ from the defaults" if others else "")
            )
        key = "fc.weight" if args.kind == "from-torchvision" else None
        given = merge(asked, kind.source, {"num_classes": num_outputs(stored.state_dict, path, key)})
        spec = parse_spec(given, path)
        stored.warn_of_assumptions(spec, given)
        return spec
    if args.kind == "from-torchvision":
        raise ConversionError(
            f"{path}: {args.kind} is for torchvision's files, and this is a {spec.arch} of zoo already"
        )
    check_same_network(spec, merge(asked), path, "the options")
    for key, value in kind.source.items():
        recorded = "inplace" if (key, spec.norm) == ("norm", "sync") else getattr(spec, key)
        if recorded != value:
            raise ConversionError(
                f"{path}: {args.kind} is for networks with {key}={value!r}, and this has {recorded!r}"
            )
    return spec.changed(memory="auto")


def _target_spec(args: Convert, source: NetworkSpec) -> NetworkSpec | None:
    """Return the spec of the converted network; None for torchvision's files, which have none."""
    changes = KINDS[args.kind].target
    slope = {"activation_param": _slope(args)} if args.kind == "relu-to-leaky-relu" else {}
    return None if changes is None else source.changed(**changes, **slope)


def _convert(args: Convert, state_dict: dict[str, Tensor], source: NetworkSpec) -> Converted:
    from zoo import convert

    settings: dict[str, Any] = {"compare_with_source": not args.no_compare}
    if args.allow_approximate:
        settings["allow_approximate"] = True
    if "activation" in KINDS[args.kind].options:
        settings |= {"activation": source.activation, "activation_param": source.activation_param, **source.options}
    if args.kind in ("fold", "export"):
        settings["norm"] = source.norm
    if args.kind == "relu-to-leaky-relu":
        settings |= {"activation_param": _slope(args), **source.options}
    kind = "fold" if args.kind == "export" else args.kind
    function = getattr(convert, kind.replace("-", "_"))
    result: Converted = function(state_dict, source.arch, **settings)
    return result


def _slope(args: Convert) -> float:
    """Return the slope of leaky_relu that was asked for, or the default."""
    return DEFAULT_SLOPE if args.activation_param is None else float(args.activation_param)


def _measure_accuracy(
    args: Convert, source: NetworkSpec, state_dict: dict[str, Tensor], result: Converted
) -> tuple[dict[str, Tensor], ConversionReport, dict[str, Any]]:
    """Return the result of a conversion from relu to leaky_relu and the accuracies before and after it.

    With ``--reestimate`` the running statistics of the result are estimated again on DIR/train. Raises ConfigError for
    weights without a classifier, DataError for images that cannot be used.
    """
    from zoo.architectures import ARCHITECTURES
    from zoo.config import parse_experiment
    from zoo.convert.conversion import build_with_weights, compare_outputs, state_dict_like
    from zoo.data.loader import build_train_loader
    from zoo.engine.reestimate import reestimate_statistics
    from zoo.run.scoring import LoadedNetwork, score
    from zoo.weights.load import num_outputs

    if ARCHITECTURES[source.arch].task == "segmentation":
        raise ConfigError(
            f"{printable(args.source)}: --data measures the accuracy of classification, and {source.arch} segments; "
            "leave it out, and score both files with zoo validate --task segmentation"
        )
    if num_outputs(state_dict, printable(args.source)) == 0:
        raise ConfigError(
            f"{printable(args.source)}: has no classifier, so there is no accuracy to measure; leave out --data"
        )
    images = _images(args, source)
    settings = {
        "network": source.for_experiment().model_dump(),
        "input": {**images.model_dump(), "crop_train": images.crop_val},
        "optimizer": {"batch_size": args.batch_size},
    }
    experiment = parse_experiment(settings, "the options of zoo convert")
    loading: dict[str, Any] = {"workers": args.workers, "on_bad_image": args.on_bad_image}

    def accuracy(model: nn.Module) -> dict[str, Any]:
        network = LoadedNetwork(str(args.source), model.float(), experiment, class_names=source.class_names)
        options: dict[str, Any] = {"batch_size": args.batch_size, "log_every": args.log_every, **loading}
        assert args.data is not None
        result_of_model = score(network, args.data, **options)
        errors = result_of_model.standard_errors()
        return {**result_of_model.scores(), "standard_errors": errors, "count": result_of_model.count}

    converted, report = result
    before = build_with_weights(state_dict, source.arch, activation="relu", **source.options)
    after = build_with_weights(converted, source.arch, activation_param=_slope(args), **source.options)
    measured: dict[str, Any] = {"before": accuracy(before), "converted": accuracy(after)}
    if args.reestimate:
        assert args.data is not None
        batches = build_train_loader(args.data, experiment, **loading)
        num_batches = reestimate_statistics(after, batches, args.reestimate)
        if num_batches == 0:
            raise DataError(
                f"{args.data}/train: gives no batch of {args.batch_size} images; give more, or a smaller --batch-size"
            )
        measured["reestimated"] = accuracy(after)
        converted = state_dict_like(after.cpu(), converted)
        compared = {} if args.no_compare else compare_outputs(before.cpu().double(), after.cpu().double())
        reason = f"{report.reason}; running statistics estimated again on {num_batches} batches"
        report = replace(report, reason=reason, **compared)
    return converted, report, measured


def _images(args: Convert, source: NetworkSpec) -> Preprocessing:
    """Return how images are prepared: as the options say, else the source, else the defaults of experiments."""
    from zoo.spec import Preprocessing

    images = source.preprocessing or Preprocessing()
    return images.model_copy(
        update={"scale_val": args.scale or images.scale_val, "crop_val": args.crop or images.crop_val}
    )


def _export(args: Convert, state_dict: dict[str, Tensor], source: NetworkSpec) -> float:
    """Write the folded network to TARGET, and return the largest difference of the outputs of the written file."""
    from zoo.convert import export, fold_network
    from zoo.convert.conversion import build_with_weights

    assert args.target is not None
    model = build_with_weights(
        state_dict, source.arch, source.norm, source.activation, source.activation_param, **source.options
    )
    return export(
        fold_network(model), args.target, _images(args, source).crop_val, {"network": source.model_dump(mode="json")}
    )


def _save(state_dict: dict[str, Tensor], spec: NetworkSpec | None, path: Path) -> None:
    """Write a state dict, with the spec of its network if it has one; ConversionError if that is impossible."""
    import torch

    from zoo.files import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            content = {} if spec is None else {"state_dict": state_dict, "network": spec.model_dump(mode="json")}
            torch.save(content or state_dict, file)
    except OSError as error:
        raise ConversionError(
            f"{printable(path)}: cannot be written ({error.strerror}); give another TARGET"
        ) from error
