"""``zoo convert``: turn a weights file into that of another variant, and report what was done and how exactly."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.options import add_loader_options, positive, whole_number
from zoo.errors import ConfigError, ConversionError

if TYPE_CHECKING:
    from torch import Tensor

    from zoo.convert import ConversionReport

KINDS = {
    "from-torchvision": "torchvision's ResNet to this package's names",
    "to-torchvision": "and back",
    "relu-to-leaky-relu": "the same weights for the network with leaky_relu",
    "inplace-to-standard": "in-place norms to plain ones",
    "standard-to-inplace": "plain norms to in-place ones",
    "fold": "norms into the convolutions before them, for inference",
    "export": "fold, and write TARGET as .pt2 (torch.export) or .onnx",
}
ACTIVATION_KINDS = ("inplace-to-standard", "standard-to-inplace", "fold", "export")
# Which options mean something for which kinds; elsewhere they are refused, as they would do nothing.
OPTION_KINDS = {
    "activation": ACTIVATION_KINDS,
    "activation_param": (*ACTIVATION_KINDS, "relu-to-leaky-relu"),
    "input_3x3": (*ACTIVATION_KINDS, "relu-to-leaky-relu"),
    "norm": ("fold", "export"),
    "allow_approximate": ("standard-to-inplace",),
    "data": ("relu-to-leaky-relu",),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``convert``."""
    parser = commands.add_parser("convert", help="turn weights into those of another variant of their network")
    kinds = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=kinds)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="weights file, checkpoint or published name")
    parser.add_argument("target", metavar="TARGET", type=Path, help="file to write")
    parser.add_argument("--arch", metavar="NAME", required=True, help="architecture of the weights (resnet50)")
    parser.add_argument("--input-3x3", action="store_true", help="the network has the stem of three 3x3 convolutions")
    parser.add_argument(
        "--activation", choices=("leaky_relu", "relu", "elu", "identity"),
        help="activation of the network (default: leaky_relu)",
    )  # fmt: skip
    parser.add_argument(
        "--activation-param", type=float, metavar="X", help="slope of leaky_relu or alpha of elu (default: 0.01)"
    )
    parser.add_argument(
        "--norm", choices=("standard", "inplace"), help="norms of the network to fold (default: standard)"
    )
    parser.add_argument(
        "--allow-approximate", action="store_true",
        help="set scales that in-place norms cannot have to the nearest that they can (default: refuse)",
    )  # fmt: skip
    parser.add_argument(
        "--no-compare", action="store_true", help="do not compare the outputs of both networks on random pictures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    _add_data_options(parser)
    parser.set_defaults(run=run)


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="(relu-to-leaky-relu) folder with val/ to measure the accuracy before and after on, and train/",
    )  # fmt: skip
    parser.add_argument(
        "--reestimate", type=whole_number, default=0, metavar="N",
        help="(with --data) estimate the running statistics again on N batches of DIR/train (default: 0, keep them)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="pictures at once (default: %(default)s)"
    )
    parser.add_argument(
        "-s", "--scale", type=positive, default=256, metavar="PX",
        help="shorter side before the crop (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--crop", type=positive, default=224, metavar="PX",
        help="side of the crop, and of the pictures of an export (default: %(default)s)",
    )  # fmt: skip
    add_loader_options(parser, workers=4)


def run(args: argparse.Namespace) -> int:
    """Convert, write TARGET and the JSON file and print the report; returns 0."""
    _check_options(args)
    from zoo.report.files import write_json
    from zoo.weights import locate_weights, read_state_dict

    state_dict = read_state_dict(locate_weights(args.source))
    try:
        converted, report = _convert(args, state_dict)
    except ConversionError as error:
        raise ConversionError(f"{args.source}: {error}") from error
    accuracy: dict[str, Any] = {}
    if args.data is not None:
        from zoo.cli.adapting import adapt

        converted, report, accuracy = adapt(args, state_dict, converted, report)
    if args.kind == "export":
        accuracy["exported_max_difference"] = _export(args, state_dict)
    else:
        _save(converted, args.target)
    print(report)
    for name, value in accuracy.items():
        print(f"  {name}: {value}")
    print(f"  written: {args.target}")
    if args.json is not None:
        write_json(args.json, {**report.to_json(), **accuracy, "source": str(args.source), "target": str(args.target)})
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do nothing for the kind, and for a target that is the source."""
    for option, kinds in OPTION_KINDS.items():
        if getattr(args, option) not in (None, False) and args.kind not in kinds:
            raise ConfigError(f"--{option.replace('_', '-')} goes with {', '.join(kinds)}, not with {args.kind}")
    if args.reestimate and args.data is None:
        raise ConfigError("--reestimate needs pictures; command line: give --data DIR with train/ and val/")
    if args.target.exists() and args.source.exists() and args.target.samefile(args.source):
        raise ConfigError(f"{args.target}: is the source too; give another file to write")


def _convert(args: argparse.Namespace, state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], ConversionReport]:
    from zoo import convert

    settings = {"compare_with_source": not args.no_compare, **_network_options(args)}
    if args.allow_approximate:
        settings["allow_approximate"] = True
    if args.kind in ("fold", "export"):
        settings["norm"] = args.norm or "standard"
    kind = "fold" if args.kind == "export" else args.kind
    function = getattr(convert, kind.replace("-", "_"))
    result: tuple[dict[str, Tensor], ConversionReport] = function(state_dict, args.arch, **settings)
    return result


def _network_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the network that were given."""
    options = {key: getattr(args, key) for key in ("activation", "activation_param")}
    return {key: value for key, value in options.items() if value is not None} | (
        {"input_3x3": True} if args.input_3x3 else {}
    )


def _export(args: argparse.Namespace, state_dict: dict[str, Tensor]) -> float:
    from zoo.convert import export, fold_network
    from zoo.convert.networks import load_network

    model = load_network(state_dict, args.arch, args.norm or "standard", **_network_options(args))
    return export(fold_network(model), args.target, args.crop)


def _save(state_dict: dict[str, Tensor], path: Path) -> None:
    """Write a state dict; ConversionError if that is impossible."""
    import torch

    from zoo.report.files import replacing

    try:
        with replacing(path) as file:
            torch.save(state_dict, file)
    except OSError as error:
        raise ConversionError(f"{path}: cannot be written ({error.strerror}); give another TARGET") from error
