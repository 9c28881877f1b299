"""``zoo convert``: convert a weights file to another variant of its network, and report how exact the result is."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zoo.cli.options import Command, argument, check_writable
from zoo.errors import ConfigError, escape

if TYPE_CHECKING:
    from zoo.convert import ConversionReport

NETWORK_OPTIONS = ("norm", "activation", "activation_param", "input_3x3")


class Conversion(NamedTuple):
    """A kind of conversion: its description, and the options that only some kinds accept."""

    meaning: str
    options: tuple[str, ...] = ()


CONVERSIONS = {
    "from-torchvision": Conversion("rename the keys of a torchvision ResNet to the keys of this package"),
    "to-torchvision": Conversion("the inverse of from-torchvision"),
    "relu-to-leaky-relu": Conversion(
        "use the weights unchanged in the network with leaky_relu", ("activation_param", "input_3x3")
    ),
    "inplace-to-standard": Conversion("convert in-place norms to standard norms", NETWORK_OPTIONS[1:]),
    "standard-to-inplace": Conversion(
        "convert standard norms to in-place norms", (*NETWORK_OPTIONS[1:], "allow_approximate")
    ),
    "export": Conversion("write the weights unchanged, as .safetensors or .pth", NETWORK_OPTIONS),
}
RESTRICTED_OPTIONS = dict.fromkeys(option for kind in CONVERSIONS.values() for option in kind.options)


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert weights to another variant of their network, and report how exact the result is."""

    example = "zoo convert export runs/mine/model_best.pth.tar mine.safetensors"
    kind: str = argument(
        "KIND",
        choices=tuple(CONVERSIONS),
        help="; ".join(f"{name}: {kind.meaning}" for name, kind in CONVERSIONS.items()),
    )
    source: Path = argument("SOURCE")
    """Weights file, checkpoint or published name."""
    target: Path = argument("TARGET")
    """File to write; weights are written as safetensors if it ends in .safetensors."""
    arch: str | None = None
    """Architecture of the weights, such as resnet50 (default: stored in SOURCE)."""
    input_3x3: bool = False
    """The network has the stem of three 3x3 convolutions."""
    activation: Literal["leaky_relu", "relu", "elu", "identity"] | None = None
    """Activation of the network (default: stored in SOURCE, or leaky_relu)."""
    activation_param: float | None = None
    """Slope of leaky_relu or alpha of elu (default: stored in SOURCE, or 0.01)."""
    norm: Literal["standard", "inplace"] | None = None
    """Norms of the network (default: stored in SOURCE, or standard)."""
    allow_approximate: bool = False
    """Round scales that in-place norms cannot represent to the nearest representable value, instead of failing."""
    json: Path | None = None
    """Write the report to FILE."""
    overwrite: bool = False
    """Replace TARGET if it exists."""

    def run(self) -> int:
        from zoo.weights._safetensors_files import SUFFIX, check_installed

        _check_options(self)
        if self.target.suffix == SUFFIX:
            check_installed(self.target)
        self._print(self._convert())
        return 0

    def _convert(self) -> ConversionReport:
        from zoo.convert._files import convert_file

        asked, options = self._given_settings(), dict[str, Any]()
        if self.kind == "relu-to-leaky-relu" and "activation_param" in asked:
            options["activation_param"] = asked.pop("activation_param")  # it sets the slope of the target
        if self.allow_approximate:
            options["allow_approximate"] = True
        return convert_file(self.kind, self.source, self.target, asked, **options)

    def _given_settings(self) -> dict[str, Any]:
        """Return the given options that describe the source's network."""
        return {key: value for key in ("arch", *NETWORK_OPTIONS) if (value := getattr(self, key)) not in (None, False)}

    def _print(self, report: ConversionReport) -> None:
        """Print the report, and write it as JSON."""
        from zoo.files import write_json

        print(report)
        print(f"  written: {escape(self.target)}")
        if self.json is not None:
            write_json(self.json, {**asdict(report), "source": str(self.source), "target": str(self.target)})


def _check_options(args: Convert) -> None:
    """Raise ConfigError for options that the kind does not accept, and for files that cannot be written."""
    for name in RESTRICTED_OPTIONS:
        if getattr(args, name) not in (None, False) and name not in CONVERSIONS[args.kind].options:
            takers = ", ".join(other for other, kind in CONVERSIONS.items() if name in kind.options)
            raise ConfigError(f"--{name.replace('_', '-')} goes with {takers}, not with {args.kind}")
    check_writable(args.target, args.json)
    if args.target.exists() and args.source.exists() and args.target.samefile(args.source):
        raise ConfigError("TARGET is the same file as SOURCE", args.target, "give another TARGET")
    if os.path.lexists(args.target) and not args.overwrite:
        raise ConfigError("TARGET exists already", args.target, "give another TARGET, or --overwrite to replace it")
