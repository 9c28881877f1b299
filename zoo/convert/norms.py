"""Converts weights between plain and in-place norms, and from relu to leaky_relu; and the norms of any network."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from zoo.convert.conversion import ConversionReport, StateDict, build_with_weights, compare_outputs, state_dict_like
from zoo.convert.norm_conversion import NormPlan, apply_plans, plan_norms
from zoo.layers.norm import ABN
from zoo.spec import merge, parse_spec


def convert_network(
    model: nn.Module,
    kind: str = "inplace",
    *,
    allow_approximate: bool = False,
    partial: bool = False,
    relu: str | None = None,
    compare_with_source: bool = True,
    images: Tensor | None = None,
) -> tuple[nn.Module, ConversionReport]:
    """Return a copy of any network with norms of the kind, as `zoo.convert.convert_norm` makes them, and the report.

    Args:
    - `model`: the network, which stays as it is.
    - `kind`, `allow_approximate`, `partial`, `relu`: those of `convert_norm`. The report's ``left`` names the norms
      that were not converted, with the reasons.
    - `images`: what both networks are compared on.

    It is exact unless a scale became eps or ReLU leaky ReLU. Raises ConversionError as `convert_norm` does.
    """
    converted = copy.deepcopy(model)
    plans, left = plan_norms(converted, kind, allow_approximate, partial, relu)
    apply_plans(converted, plans, kind)
    clamped = {plan.name: plan.num_clamped for plan in plans if plan.num_clamped}
    leaky = sum(plan.replaces_relu for plan in plans)
    changes = {f"{leaky} ReLUs became leaky ReLU": leaky, f"{sum(clamped.values())} scales became eps": clamped}
    reasons = [change for change, present in changes.items() if present]
    measured: dict[str, Any] = {}
    if compare_with_source:
        source, target = (copy.deepcopy(network).double().eval() for network in (model, converted))
        measured = compare_outputs(source, target, images, None if reasons else model.state_dict())
    return converted, ConversionReport(
        f"norms to {kind}", type(model).__name__, tuple(plan.name for plan in plans), not reasons,
        "; ".join(reasons) or "the norms compute the same", clamped=clamped, left=left, **measured,
    )  # fmt: skip


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
    """Return the weights for the network with standard norms: every scale becomes |weight| + eps; exact."""
    settings = {"activation": activation, "activation_param": activation_param, **options}
    converted, plans, measured = _change_norms(
        state_dict, arch, ("inplace", "standard"), settings, compare_with_source, images
    )
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

    A weight w >= eps becomes w - eps. For a negative w the filter before the norm and the running mean change their
    sign, so that the normalised values change theirs, and the weight becomes |w| - eps; shift and variance stay. This
    is exact, in training too, where the norm directly follows a convolution that feeds nothing else. Raises
    ConversionError with the names of the norms where it does not, or where |w| < eps; with ``allow_approximate`` such
    scales become eps, the nearest that in-place norms can have. Raises ConfigError for an activation without an
    inverse.
    """
    settings = {"activation": activation, "activation_param": activation_param, **options}
    converted, plans, measured = _change_norms(
        state_dict, arch, ("standard", "inplace"), settings, compare_with_source, images, allow_approximate
    )
    clamped = {plan.name: plan.num_clamped for plan in plans if plan.num_clamped}
    folded = sum(plan.num_negative for plan in plans if plan.convolution is not None)
    reason = f"{folded} negative scales went into the filters before them"
    if clamped:
        reason += f"; {sum(clamped.values())} scales became eps"
    convolutions = [plan.convolution for plan in plans if plan.convolution is not None]
    layers = (*(plan.name for plan in plans), *convolutions)
    report = ConversionReport("standard-to-inplace", arch, layers, not clamped, reason, clamped=clamped, **measured)
    return converted, report


def _change_norms(
    state_dict: StateDict,
    arch: str,
    kinds: tuple[str, str],
    settings: dict[str, Any],
    compare_with_source: bool,
    images: Tensor | None,
    allow_approximate: bool = False,
) -> tuple[dict[str, Tensor], list[NormPlan], dict[str, Any]]:
    """Return the weights for norms of the second kind, what was done to each norm, and what was measured."""
    old, new = kinds
    parse_spec(merge({"arch": arch, "norm": new}, settings), arch)  # refuses what the target cannot have
    model = build_with_weights(state_dict, arch, old, **settings)
    plans, _ = plan_norms(model, new, allow_approximate)
    apply_plans(model, plans, new)
    converted = state_dict_like(model, state_dict)
    if not compare_with_source:
        return converted, plans, {}
    source = build_with_weights(state_dict, arch, old, **settings)
    target = build_with_weights(converted, arch, new, **settings)
    is_exact = not any(plan.num_clamped for plan in plans)
    return converted, plans, compare_outputs(source, target, images, state_dict if is_exact else None)


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

    Both networks have standard norms; ``activation_param`` is the slope of leaky_relu.
    ``zoo convert relu-to-leaky-relu --data DIR`` measures the loss of accuracy and can estimate the running statistics
    again.
    """
    target = build_with_weights(state_dict, arch, activation_param=activation_param, **options)
    measured: dict[str, Any] = {}
    if compare_with_source:
        source = build_with_weights(state_dict, arch, activation="relu", **options)
        measured = compare_outputs(source, target, images)
    reason = f"the weights are the same, but negative values now pass with slope {activation_param:g}"
    norms = {name: part for name, part in target.named_modules() if isinstance(part, ABN)}
    layers = tuple(name for name, norm in norms.items() if norm.activation != "identity")
    converted = state_dict_like(target, state_dict)
    return converted, ConversionReport("relu-to-leaky-relu", arch, layers, False, reason, **measured)
