"""Turns the norms of any model into another kind, weights kept, where that is safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zoo.errors import ConversionError
from zoo.layers.norm import ABN, KINDS, InPlaceABN, InPlaceABNSync
from zoo.layers.trace import Trace, function_name
from zoo.ops.abn.functional import check_activation

OTHER_ACTIVATIONS = ("relu", "leaky_relu", "elu", "relu6", "gelu", "silu", "hardswish", "mish", "selu", "celu")


@dataclass
class NormPlan:
    """What is to become of one norm: its settings, the activation that it takes in, the filters to negate."""

    name: str
    old: Any
    activation: str
    activation_param: float
    inplace: bool
    absorbed: str | None = None
    convolution: str | None = None
    num_negative: int = 0
    num_clamped: int = 0


def convert_norm(module: nn.Module, kind: str, *, allow_approximate: bool = False) -> nn.Module:
    """Turn every BatchNorm2d of ``module``, with the activation module behind it, into the norm ``kind``; return it.

    ``kind`` is "standard" (`ABN`), "inplace" or "sync".  Norms of this package are turned as well.  ``module`` is
    changed, as by `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, and computes the same as before: parameters and
    buffers stay the same objects; as the in-place scale is |weight| + eps, eps is taken off the weights, and where
    one is negative the filter before it and the running mean change their sign instead.  Taken-in activations become
    nn.Identity.  relu goes into `ABN` only.

    The forward pass is traced with torch.fx.  Raises ConversionError, which lists all norms in question with the
    reasons and leaves ``module`` as it was, where the input of a BatchNorm2d is needed by something else, its output is
    overwritten, its activation has no in-place form or cannot be taken in, or a scale cannot be represented (unless
    ``allow_approximate``: then it becomes the nearest one, eps).  An `ABN` whose input is still needed becomes an
    `InPlaceABN` with ``inplace = False``, as in this package's networks.
    """
    plans = plan_norms(module, kind, allow_approximate)
    apply_plans(module, plans, kind)
    return module


def plan_norms(module: nn.Module, kind: str, allow_approximate: bool = False) -> list[NormPlan]:
    """Return what `convert_norm` will do to each norm; ConversionError as it says there.  Nothing is changed."""
    if kind not in KINDS:
        raise ConversionError(f"norm {kind!r} is not one of {', '.join(KINDS)}")
    norms = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, (nn.BatchNorm2d, ABN)) and type(part) is not KINDS[kind]
    }
    if not norms:
        return []
    trace, plans, problems = Trace(module), [], []
    for name, norm in norms.items():
        try:
            plan = _plan(trace, name, norm, kind)
            _plan_scale(trace, plan, kind, allow_approximate)
        except _UnsafeError as error:
            problems.append(f"  {name or 'the module itself'} ({type(norm).__name__}): {error}")
        else:
            plans.append(plan)
    if problems:
        raise ConversionError(
            f"{len(problems)} of {len(norms)} norms of {type(module).__name__} cannot become {KINDS[kind].__name__}; "
            "nothing was converted:\n" + "\n".join(problems)
        )
    return plans


def apply_plans(module: nn.Module, plans: list[NormPlan], kind: str) -> None:
    """Carry out plans of `plan_norms` on the same module."""
    modules = dict(module.named_modules())
    replaced: dict[int, nn.Module] = {}
    for plan in plans:
        replaced[id(plan.old)] = _converted(plan, kind, modules)
        if plan.absorbed is not None:
            replaced[id(modules[plan.absorbed])] = nn.Identity()
    replace_modules(module, replaced)


def replace_modules(module: nn.Module, replaced: Mapping[int, nn.Module]) -> None:
    """Put other modules in the place of those with the given ids, under every name that they have in ``module``."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
    if replaced and getattr(module, "built_as", None) is not None:
        module.built_as = None  # type: ignore[assignment]  # weights of what it was no longer mean the same in it


class _UnsafeError(Exception):
    pass


def _plan(trace: Trace, name: str, norm: Any, kind: str) -> NormPlan:
    """Return the plan of one norm, its scale left aside."""
    calls = trace.calls.get(name, [])
    if type(norm) not in (nn.BatchNorm2d, *KINDS.values()):
        raise _UnsafeError(f"what a subclass of {type(norm).__bases__[0].__name__} computes is not known")
    if len(calls) != 1 or not name:
        raise _UnsafeError(f"the forward pass calls it {len(calls)} times, not once")
    (node,) = calls
    if isinstance(norm, ABN):
        plan = NormPlan(name, norm, norm.activation, norm.activation_param, getattr(norm, "inplace", True))
    else:
        plan = _plan_activation(trace, name, norm, node, kind)
    if kind == "standard":
        return plan
    try:
        check_activation(plan.activation, plan.activation_param, KINDS[kind].activations)
    except ValueError as error:
        raise _UnsafeError(f"{error} that can be inverted") from None
    if not isinstance(norm, InPlaceABN) and (reason := trace.why_input_is_needed(node)):
        if not isinstance(norm, ABN):
            raise _UnsafeError(reason)
        plan.inplace = False
    return plan


def _plan_activation(trace: Trace, name: str, norm: nn.Module, node: fx.Node, kind: str) -> NormPlan:
    """Return the plan of a BatchNorm2d with the activation that it can take in; identity if there is none."""
    plan = NormPlan(name, norm, "identity", 0.01, True)
    last = next(iter(node.users)) if len(node.users) == 1 else None
    if last is not None and (found := _activation_of(trace.module_of(last))) and _removable(trace, last):
        plan.activation, plan.activation_param = found
        plan.absorbed = str(last.target)
    elif kind != "standard" and last is not None and _is_activation(trace, last):
        raise _UnsafeError(
            f"its activation {last.name} cannot be taken in: it is a function, is used elsewhere too, or has no "
            "in-place form (leaky_relu and elu have one); give the norm an activation module of its own"
        )
    output = last if plan.absorbed is not None and last is not None else node
    overwriters = trace.overwriters(output)
    if overwriters and (kind != "standard" or plan.absorbed is not None):
        raise _UnsafeError(f"its output, which backward needs, is overwritten by {', '.join(overwriters)}")
    return plan


def _activation_of(module: nn.Module | None) -> tuple[str, float] | None:
    """Return the name and the parameter of an activation module that norms have too; None for any other."""
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.ELU and module.alpha > 0:
        return "elu", module.alpha
    return ("relu", 0.01) if type(module) is nn.ReLU else None


def _is_activation(trace: Trace, node: fx.Node) -> bool:
    module = trace.module_of(node)
    if module is not None:
        return type(module).__module__ == "torch.nn.modules.activation"
    return function_name(node).rstrip("_") in OTHER_ACTIVATIONS


def _removable(trace: Trace, node: fx.Node) -> bool:
    """Whether every call of an activation module directly follows a BatchNorm2d that feeds nothing else."""
    return all(
        type(trace.module_of(call.all_input_nodes[0])) is nn.BatchNorm2d and len(call.all_input_nodes[0].users) == 1
        for call in trace.calls[str(node.target)]
    )


def _plan_scale(trace: Trace, plan: NormPlan, kind: str, allow_approximate: bool) -> None:
    """Find out how the signed scale of a standard norm becomes |weight| + eps."""
    weight = plan.old.weight
    if kind == "standard" or isinstance(plan.old, InPlaceABN) or weight is None:
        return
    negative, small = weight < 0, weight.abs() < plan.old.eps
    plan.num_negative = int(negative.sum())
    if plan.num_negative:
        plan.convolution = trace.convolution_before(plan.name)
    stuck = negative & ~small if plan.convolution is None else torch.zeros_like(negative)
    plan.num_clamped = int((small | stuck).sum())
    if plan.num_clamped and not allow_approximate:
        reasons = {
            f"{int(stuck.sum())} negative scales, and no convolution before it that feeds nothing else": stuck.any(),
            f"{int(small.sum())} scales with |scale| < eps = {plan.old.eps:g}": small.any(),
        }
        raise _UnsafeError(
            f"{' and '.join(reason for reason, present in reasons.items() if present)}; the scale of "
            f"{KINDS[kind].__name__} is |weight| + eps (allow_approximate=True sets them to eps)"
        )


@torch.no_grad()
def _converted(plan: NormPlan, kind: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the new norm, which has the parameters and buffers of the old one."""
    old, layer = plan.old, KINDS[kind]
    new: Any = layer(
        old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats,
        plan.activation, plan.activation_param,
    )  # fmt: skip
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    new.frozen = getattr(old, "frozen", False)
    new.training = old.training
    if isinstance(new, InPlaceABN):
        new.inplace = plan.inplace
    if isinstance(new, InPlaceABNSync):
        new.group = getattr(old, "group", None)
    if isinstance(new, InPlaceABN) != isinstance(old, InPlaceABN) and old.weight is not None:
        _move_scale(plan, kind, modules)
    return new


def _move_scale(plan: NormPlan, kind: str, modules: Mapping[str, nn.Module]) -> None:
    old = plan.old
    if kind == "standard":
        old.weight.copy_(old.weight.abs() + old.eps)
        return
    scale: Tensor = old.weight.detach().clone()
    if plan.convolution is not None:
        negative = scale < 0
        conv = modules[plan.convolution]
        for tensor in (conv.weight, conv.bias, old.running_mean):
            if isinstance(tensor, Tensor):
                tensor[negative] = -tensor[negative]
        scale = scale.abs()
    old.weight.copy_((scale - old.eps).clamp(min=0))
