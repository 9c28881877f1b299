"""Common parts of all conversions: building a network from a state dict, comparing outputs, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config.architectures import ARCHITECTURES
from zoo.config.network import ExternalSpec, NetworkSpec, Spec, parse_spec, spec_class
from zoo.config.parse import find_experiment, load_experiment
from zoo.errors import ConversionError, VerificationError, join_names
from zoo.models.build import build_on_meta
from zoo.models.external import iter_tensors
from zoo.weights import load_state_dict
from zoo.weights._load import num_rows
from zoo.weights._load_file import count_classes

StateDict = Mapping[str, Tensor]
RANDOM_SIZE = (2, 3, 64, 64)
ROUNDING_TOLERANCE = 1e4  # largest difference of exact conversions, in units of eps times the largest output
MAX_PRINTED_NAMES = 6  # layer names in a printed report
RELU_NETWORK = {"norm": "standard", "activation": "relu"}
# Kind of conversion -> settings that its source must have.
REQUIRED_SETTINGS: dict[str, dict[str, str]] = {
    "from-torchvision": RELU_NETWORK,
    "to-torchvision": RELU_NETWORK,
    "relu-to-leaky-relu": RELU_NETWORK,
    "inplace-to-standard": {"norm": "inplace"},
    "standard-to-inplace": {"norm": "standard"},
}


@dataclass(frozen=True)
class ConversionReport:
    """Report of a conversion: the changed layers, and how exact it is.

    Args:
    - `conversion`: kind of conversion, as in ``zoo convert``.
    - `arch`: the architecture.
    - `layers`: names of layers whose weights or activation changed.
    - `exact`: whether the outputs are the same up to rounding in the dtype of the weights.
    - `reason`: why the conversion is exact or approximate.
    - `clamped`: name of a norm -> number of scales that in-place norms cannot represent, set to eps.
    - `max_difference`: largest absolute difference between the outputs of source and result, in float64 and evaluation
      mode; None if the weights are unchanged.
    - `max_output`: largest absolute output of the source in that comparison.
    """

    conversion: str
    arch: str
    layers: tuple[str, ...]
    exact: bool
    reason: str
    clamped: dict[str, int] = field(default_factory=dict)
    max_difference: float | None = None
    max_output: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.conversion} {self.arch}: {'exact' if self.exact else 'approximate'}, {self.reason}"]
        if self.layers:
            lines.append(f"  layers touched: {len(self.layers)} ({join_names(self.layers, MAX_PRINTED_NAMES)})")
        if self.clamped:
            counts = [f"{name}: {count}" for name, count in self.clamped.items()]
            lines.append(f"  norms with scales set to eps: {len(counts)} ({join_names(counts, MAX_PRINTED_NAMES)})")
        if self.max_difference is None:
            lines.append("  outputs: not compared")
        else:
            lines.append(
                f"  outputs: largest difference {self.max_difference:.2e}, "
                f"largest output {self.max_output:.2e} (float64)"
            )
        return "\n".join(lines)


def source_spec(state_dict: StateDict, network: str | Spec, conversion: str) -> NetworkSpec:
    """Return the spec of a conversion's source, with the number of classes of its state dict.

    ``network`` is a spec or a name. An architecture gets the norms and the activation that the conversion requires. The
    memory strategy is reset to the default, because it may not support the norms of the result. Raises ConfigError for
    an unknown name, and ConversionError if the conversion does not support the network.
    """
    spec = network if isinstance(network, Spec) else _named(network, conversion)
    check_convertible(spec.arch, conversion)
    assert isinstance(spec, NetworkSpec)
    for key, value in REQUIRED_SETTINGS.get(conversion, {}).items():
        found = getattr(spec, key)
        if found != value and (found, value) != ("sync", "inplace"):
            raise ConversionError(f"{conversion} requires {key}={value!r}, and the network has {found!r}")
    num_classes = count_source_classes(state_dict, spec, conversion, f"the state dict given for {spec.arch}")
    changes = {} if num_classes == spec.num_classes else {"num_classes": num_classes}
    return spec.changed(**changes, memory="auto")


def count_source_classes(state_dict: StateDict, spec: Spec, conversion: str, source: str) -> int:
    """Return the number of classes in the source of a conversion. Raises the errors of `count_classes`."""
    if conversion == "from-torchvision":
        return num_rows(state_dict, "fc.weight", source)
    return count_classes(state_dict, spec, source)


def _named(name: str, conversion: str) -> Spec:
    """Return the spec of an experiment, or of an architecture with the settings that the conversion requires."""
    file = None if name in ARCHITECTURES else find_experiment(name)
    if file is not None:
        return load_experiment(file).network
    check_convertible(name, conversion)
    return parse_spec({"arch": name, **REQUIRED_SETTINGS[conversion]}, conversion)


def check_convertible(arch: str, conversion: str) -> None:
    """Raise ConversionError for a network of another package, or with fixed norms and activation."""
    if spec_class(arch) is Spec:
        what = f"{arch} has its own norms and activation, which {conversion} cannot change"
        raise ConversionError(what, remedy="use its weights as they are; zoo convert export copies them")
    if spec_class(arch) is ExternalSpec:
        package, _, name = arch.partition(":")
        what = f"{arch} is a network of {package}, and {conversion} converts networks of zoo"
        remedy = (
            f'convert it with zoo convert export; or if zoo has one, name its own: --arch {name}, in Python "{name}"'
        )
        raise ConversionError(what, remedy=remedy)


def build_with_weights(state_dict: StateDict, spec: Spec) -> nn.Module:
    """Build the network of a spec with the weights of a state dict, in float64 and evaluation mode.

    Raises WeightsError if they do not fit.
    """
    source = f"the state dict given for {spec.arch}"
    model = build_on_meta(spec)
    model = model.double().to_empty(device="cpu")
    load_state_dict(model, state_dict, source=source)
    return model.eval()


def state_dict_like(model: nn.Module, like: StateDict) -> dict[str, Tensor]:
    """Return a copy of the model's state dict with the floating-point dtypes of ``like``."""
    dtype = next((tensor.dtype for tensor in like.values() if tensor.is_floating_point()), torch.float32)
    return {
        key: tensor.detach().to(like[key].dtype if key in like else dtype, copy=True)
        if tensor.is_floating_point()
        else tensor.detach().clone()
        for key, tensor in model.state_dict().items()
    }


@torch.no_grad()
def compare_outputs(source: nn.Module, target: nn.Module, exact_for: StateDict | None = None) -> dict[str, Any]:
    """Compare two float64 networks on two fixed random images; return ``max_difference`` and ``max_output``.

    Args:
    - `source`: the network before the conversion.
    - `target`: the network after it.
    - `exact_for`: weights of the source if outputs may differ by rounding only; their coarsest dtype sets the limit.

    Raises ConversionError for outputs that are not finite, and VerificationError for differences above the limit.
    """
    images = torch.randn(RANDOM_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, actual = (
        torch.cat([output.flatten() for output in iter_tensors(network(images.clone()))])
        for network in (source, target)
    )
    if not (expected.isfinite().all() and actual.isfinite().all()):
        raise ConversionError(
            "the outputs on random images are not finite, before or after the conversion: the weights are damaged"
        )
    difference, largest = (expected - actual).abs().max().item(), expected.abs().max().item()
    if exact_for is not None:
        dtypes = {tensor.dtype for tensor in exact_for.values() if tensor.is_floating_point()} or {torch.float32}
        dtype = max(dtypes, key=lambda kind: torch.finfo(kind).eps)
        allowed = ROUNDING_TOLERANCE * torch.finfo(dtype).eps * largest
        if difference > allowed:
            raise VerificationError(
                f"an exact conversion changed the outputs by {difference:.2e}, more than the rounding of {dtype} "
                f"explains ({allowed:.2e}); this is a fault of zoo, please report it"
            )
    return {"max_difference": difference, "max_output": largest}
