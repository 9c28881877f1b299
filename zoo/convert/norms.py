"""Between plain and in-place norms, and from relu to leaky_relu."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.convert.networks import StateDict, compare, compare_exact, load_network, state_dict_like
from zoo.convert.report import ConversionReport
from zoo.errors import ConversionError
from zoo.layers.norm import ABN
from zoo.layers.norm_conversion import apply_plans, plan_norms
from zoo.ops.abn.functional import INVERTIBLE_ACTIVATIONS


def inplace_to_standard(
    state_dict: StateDict,
    arch: str,
    *,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    compare_with_source: bool = True,
    images: Tensor | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the weights for the network with standard norms: every scale becomes |weight| + eps; exact.

    ``activation`` and ``options`` (``input_3x3``, ...) are those of the network. Raises WeightsError if the state dict
    does not fit.
    """
    settings = {"activation": activation, "activation_param": activation_param, **options}
    model = load_network(state_dict, arch, "inplace", **settings)
    plans = plan_norms(model, "standard")
    apply_plans(model, plans, "standard")
    converted = state_dict_like(model, state_dict)
    measured: dict[str, Any] = {}
    if compare_with_source:
        source, target = (
            load_network(state_dict, arch, "inplace", **settings),
            load_network(converted, arch, **settings),
        )
        measured = compare_exact(source, target, images, state_dict)
    layers = tuple(plan.name for plan in plans)
    reason = "each scale is now |weight| + eps"
    return converted, ConversionReport("inplace-to-standard", arch, layers, True, reason, **measured)


def standard_to_inplace(
    state_dict: StateDict,
    arch: str,
    *,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    allow_approximate: bool = False,
    compare_with_source: bool = True,
    images: Tensor | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the weights for the network with in-place norms, whose scale is |weight| + eps.

    Weights w >= eps become w - eps. For a negative w the filter before the norm and the running mean change their
    sign, so that normalised values do too, and the weight becomes |w| - eps; shift and variance stay. That is exact,
    in training too, where the norm directly follows a convolution that feeds nothing else. Raises ConversionError
    with the names of the norms where it does not, or where |w| < eps; with ``allow_approximate`` such scales become
    the nearest that there is, eps; and for an activation that in-place norms cannot have.
    """
    if activation not in INVERTIBLE_ACTIVATIONS:
        first = "convert to leaky_relu first: zoo convert relu-to-leaky-relu SOURCE TARGET (it measures the loss too)"
        raise ConversionError(
            f"in-place norms cannot have the activation {activation}, they have {', '.join(INVERTIBLE_ACTIVATIONS)}"
            + (f"; {first}" if activation == "relu" else "")
        )
    settings = {"activation": activation, "activation_param": activation_param, **options}
    model = load_network(state_dict, arch, **settings)
    plans = plan_norms(model, "inplace", allow_approximate)
    apply_plans(model, plans, "inplace")
    converted = state_dict_like(model, state_dict)
    clamped = {plan.name: plan.num_clamped for plan in plans if plan.num_clamped}
    measured: dict[str, Any] = {}
    if compare_with_source:
        source, target = (
            load_network(state_dict, arch, **settings),
            load_network(converted, arch, "inplace", **settings),
        )
        measured = compare(source, target, images) if clamped else compare_exact(source, target, images, state_dict)
    folded = sum(plan.num_negative for plan in plans if plan.convolution is not None)
    reason = f"{folded} negative scales went into the filters before them"
    if clamped:
        reason += f"; {sum(clamped.values())} scales became eps"
    convolutions = [plan.convolution for plan in plans if plan.convolution is not None]
    layers = (*(plan.name for plan in plans), *convolutions)
    report = ConversionReport("standard-to-inplace", arch, layers, not clamped, reason, clamped=clamped, **measured)
    return converted, report


def relu_to_leaky_relu(
    state_dict: StateDict,
    arch: str,
    *,
    activation_param: float = 0.01,
    compare_with_source: bool = True,
    images: Tensor | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the weights of a relu network, unchanged, for the same network with leaky_relu; approximate.

    Both have standard norms. ``zoo convert relu-to-leaky-relu --data DIR`` measures the loss of accuracy and can
    estimate the running statistics again.
    """
    target = load_network(state_dict, arch, activation_param=activation_param, **options)
    source = load_network(state_dict, arch, activation="relu", **options) if compare_with_source else None
    measured = {} if source is None else compare(source, target, images)
    reason = f"the weights are the same, but negative values now pass with slope {activation_param:g}"
    layers = _activated(target)
    converted = state_dict_like(target, state_dict)
    return converted, ConversionReport("relu-to-leaky-relu", arch, layers, False, reason, **measured)


def _activated(model: nn.Module) -> tuple[str, ...]:
    norms = {name: part for name, part in model.named_modules() if isinstance(part, ABN)}
    return tuple(name for name, norm in norms.items() if norm.activation != "identity")
