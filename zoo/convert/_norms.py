"""Converts weights between standard and in-place norms, and from relu to leaky_relu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.config.network import NetworkSpec
from zoo.convert._conversion import (
    ConversionReport,
    StateDict,
    build_with_weights,
    compare_outputs,
    source_spec,
    state_dict_like,
)
from zoo.convert._norm_conversion import NormPlan, apply_plans, plan_norms
from zoo.layers.norm import ABN


def inplace_to_standard(
    state_dict: StateDict, spec: str | NetworkSpec
) -> tuple[dict[str, Tensor], NetworkSpec, ConversionReport]:
    """Convert weights to standard norms: every scale becomes |weight| + eps. Exact."""
    source = source_spec(state_dict, spec, "inplace-to-standard")
    target = source.changed(norm="standard")
    converted, plans, measured = _change_norms(state_dict, source, target)
    layers = tuple(plan.name for plan in plans)
    reason = "each scale is now |weight| + eps"
    return converted, target, ConversionReport("inplace-to-standard", source.arch, layers, True, reason, **measured)


def standard_to_inplace(
    state_dict: StateDict,
    spec: str | NetworkSpec,
    *,
    allow_approximate: bool = False,
) -> tuple[dict[str, Tensor], NetworkSpec, ConversionReport]:
    """Convert weights to in-place norms, whose scale is |weight| + eps.

    A weight w >= eps becomes w - eps. A negative w becomes |w| - eps, and the signs of the filter before the norm and
    of the running mean are flipped, which negates the normalized values; bias and variance are unchanged. This is
    exact, also in training, if the norm directly follows a convolution whose output nothing else reads. Otherwise, and
    for |w| < eps, raises ConversionError with the names of the norms, or with ``allow_approximate`` sets these scales
    to eps, the nearest possible scale. Raises ConfigError for an activation without an inverse.
    """
    source = source_spec(state_dict, spec, "standard-to-inplace")
    target = source.changed(norm="inplace")
    converted, plans, measured = _change_norms(state_dict, source, target, allow_approximate)
    clamped = {plan.name: plan.num_clamped for plan in plans if plan.num_clamped}
    folded = sum(plan.num_negative for plan in plans if plan.producer is not None)
    reason = f"{folded} negative scales went into the filters before them"
    if clamped:
        reason += f"; {sum(clamped.values())} scales became eps"
    producers = [plan.producer for plan in plans if plan.producer is not None]
    layers = (*(plan.name for plan in plans), *producers)
    report = ConversionReport(
        "standard-to-inplace", source.arch, layers, not clamped, reason, clamped=clamped, **measured
    )
    return converted, target, report


def _change_norms(
    state_dict: StateDict, source: NetworkSpec, target: NetworkSpec, allow_approximate: bool = False
) -> tuple[dict[str, Tensor], list[NormPlan], dict[str, Any]]:
    """Convert weights to the norms of ``target``; return them with the plan for each norm and measured differences."""
    model = build_with_weights(state_dict, source)
    plans, _ = plan_norms(model, target.norm, allow_approximate)
    apply_plans(model, plans, target.norm)
    converted = state_dict_like(model, state_dict)
    networks = build_with_weights(state_dict, source), build_with_weights(converted, target)
    is_exact = not any(plan.num_clamped for plan in plans)
    return converted, plans, compare_outputs(*networks, state_dict if is_exact else None)


def relu_to_leaky_relu(
    state_dict: StateDict,
    spec: str | NetworkSpec,
    *,
    activation_param: float = 0.01,
) -> tuple[dict[str, Tensor], NetworkSpec, ConversionReport]:
    """Use the weights of a relu network, unchanged, with leaky_relu of slope ``activation_param``. Approximate.

    Both networks have standard norms.
    """
    source = source_spec(state_dict, spec, "relu-to-leaky-relu")
    target = source.changed(activation="leaky_relu", activation_param=activation_param)
    model = build_with_weights(state_dict, target)
    measured = compare_outputs(build_with_weights(state_dict, source), model)
    reason = f"the weights are unchanged, but negative values now pass with slope {activation_param:g}"
    norms = {name: part for name, part in model.named_modules() if isinstance(part, ABN)}
    layers = tuple(name for name, norm in norms.items() if norm.activation != "identity")
    report = ConversionReport("relu-to-leaky-relu", source.arch, layers, False, reason, **measured)
    return state_dict_like(model, state_dict), target, report
