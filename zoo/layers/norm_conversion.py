"""Replaces the norms of any model by norms of another kind that compute the same, where that is safe."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.errors import MAX_LISTED, ConversionError, listed, printable
from zoo.layers.norm import ABN, KINDS, InPlaceABN, InPlaceABNSync
from zoo.layers.trace import Trace, function_name
from zoo.ops.abn.functional import INVERTIBLE_ACTIVATIONS

logger = logging.getLogger(__name__)

OTHER_ACTIVATIONS = ("relu", "leaky_relu", "elu", "relu6", "gelu", "silu", "hardswish", "mish", "selu", "celu")

# What to do about each cause of a refusal. The message lists the causes beside the norms' names.
SUBCLASS = "replace them by nn.BatchNorm2d, if they compute the same"
NOT_ONCE = "give the model a norm of its own for each call, and remove those that are never called"
NO_FORM = "put nn.LeakyReLU or nn.ELU in its place, and train again: the network computes something else"
FUNCTION = "call a module (nn.LeakyReLU or nn.ELU) instead of the function, one for each norm"
SHARED = "give each norm an activation module of its own, which nothing else calls"
OVERWRITTEN = "write x = x + y for x += y, and give what follows inplace=False"
INPUT_NEEDED = (
    "let the others read the norm's output, if that is what they should read; or convert the other parts only"
)
NO_SCALE = "allow_approximate=True (--allow-approximate of zoo convert) sets such scales to eps"


@dataclass
class NormPlan:
    """How one norm is replaced.

    ``absorbed`` is the name of the activation module that the new norm takes over, ``convolution`` that of the
    convolution whose filters are negated for ``num_negative`` negative scales. ``num_clamped`` scales cannot be
    represented and become eps.
    """

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
    """Replace every BatchNorm2d of ``module``, with the activation module behind it, by the norm ``kind``; return it.

    Args:
    - `module`: the network. It is changed, as by `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, and computes the same
      as before. Norms of this package are replaced as well.
    - `kind`: "standard" (`ABN`), "inplace" or "sync".
    - `allow_approximate`: replace scales that cannot be represented by the nearest possible scale, eps.

    Parameters and buffers stay the same objects. As the in-place scale is |weight| + eps, eps is subtracted from the
    weights, and where a weight is negative the filter before it and the running mean change their sign instead.
    Activation modules that a norm takes over become nn.Identity; only `ABN` takes over relu.

    The forward pass is traced with torch.fx. Raises ConversionError, which lists the norms in question with the
    reasons and what to do, and leaves ``module`` as it was, where the input of a BatchNorm2d is needed by something
    else, its output is overwritten, its activation has no in-place form, is a function or is shared, or a scale cannot
    be represented (unless ``allow_approximate``); and where there is no norm to convert. Batch norms of other kinds
    (1d, 3d, SyncBatchNorm) stay, and are named in a warning. An `ABN` whose input is still needed becomes an
    `InPlaceABN` with ``inplace = False``, as in this package's networks.
    """
    plans = plan_norms(module, kind, allow_approximate)
    apply_plans(module, plans, kind)
    return module


def plan_norms(module: nn.Module, kind: str, allow_approximate: bool = False) -> list[NormPlan]:
    """Return what `convert_norm` would do to each norm, or raise its ConversionError. Nothing is changed."""
    if kind not in KINDS:
        raise ConversionError(f"norm {kind!r} is not one of {', '.join(KINDS)}")
    norms = _norms_to_convert(module)
    norms = {name: norm for name, norm in norms.items() if type(norm) is not KINDS[kind]}
    if not norms:
        return []
    trace, plans, problems, advice = Trace(module), [], [], Counter[str]()
    for name, norm in norms.items():
        try:
            plan = _plan(trace, name, norm, kind)
            _plan_scale(trace, plan, kind, allow_approximate)
        except _UnsafeError as error:
            problems.append(f"  {_described(name, norm)}: {error.reason}")
            advice[error.advice] += 1
        else:
            plans.append(plan)
    if problems:
        more = [f"  and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ConversionError(
            f"{len(problems)} of {len(norms)} norms of {type(module).__name__} cannot become {KINDS[kind].__name__}; "
            "nothing was converted:\n" + "\n".join(problems[:MAX_LISTED] + more) + "\nWhat to do:\n"
            + "\n".join(f"- {text} ({count} norm{'s' * (count > 1)})" for text, count in advice.items())
        )  # fmt: skip
    return plans


def _norms_to_convert(module: nn.Module) -> dict[str, nn.BatchNorm2d | ABN]:
    """Return the norms that can be replaced, by name; log which others stay. ConversionError where there are none."""
    norms = {name: part for name, part in module.named_modules() if isinstance(part, (nn.BatchNorm2d, ABN))}
    others = [
        (name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm) and name not in norms
    ]
    names = listed(_described(name, part) for name, part in others)
    if norms:
        if others:
            logger.warning("only BatchNorm2d and the norms of zoo are converted; left as they are: %s", names)
        return norms
    synchronised = any(isinstance(part, nn.SyncBatchNorm) for _, part in others)
    hint = 'convert before nn.SyncBatchNorm.convert_sync_batchnorm, and to "sync"' if synchronised else ""
    raise ConversionError(
        f"{type(module).__name__} has no norm to convert: neither a BatchNorm2d nor one of zoo"
        + (f"; its others are {names}" if others else "")
        + (f"; {hint}" if hint else "")
    )


def _described(name: str, part: nn.Module) -> str:
    return f"{printable(name) or 'the module itself'} ({type(part).__name__})"


def apply_plans(module: nn.Module, plans: list[NormPlan], kind: str) -> None:
    """Replace norms and activations as planned by `plan_norms` for the same module."""
    modules = dict(module.named_modules())
    replaced: dict[int, nn.Module] = {}
    for plan in plans:
        replaced[id(plan.old)] = _converted(plan, kind, modules)
        if plan.absorbed is not None:
            replaced[id(modules[plan.absorbed])] = nn.Identity()
    replace_modules(module, replaced)


def replace_modules(module: nn.Module, replaced: Mapping[int, nn.Module]) -> None:
    """Replace the modules whose ids are the keys of ``replaced``, under every name that they have in ``module``."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
    if replaced and getattr(module, "built_as", None) is not None:
        module.built_as = None  # type: ignore[assignment]  # published weights no longer fit it


class _UnsafeError(Exception):
    """Why a norm cannot be converted, and what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


def _plan(trace: Trace, name: str, norm: Any, kind: str) -> NormPlan:
    """Return the plan of one norm, without regard to its scale."""
    calls = trace.calls.get(name, [])
    if type(norm) not in (nn.BatchNorm2d, *KINDS.values()):
        raise _UnsafeError(f"what a subclass of {type(norm).__bases__[0].__name__} computes is not known", SUBCLASS)
    if len(calls) != 1 or not name:
        raise _UnsafeError(f"the forward pass calls it {len(calls)} times, not once", NOT_ONCE)
    (node,) = calls
    if isinstance(norm, ABN):
        plan = NormPlan(name, norm, norm.activation, norm.activation_param, getattr(norm, "inplace", True))
    else:
        plan = _plan_activation(trace, name, norm, node, kind)
    if kind == "standard":
        return plan
    if plan.activation not in INVERTIBLE_ACTIVATIONS:  # of an ABN; that of a BatchNorm2d was checked above
        raise _UnsafeError(f"its activation {plan.activation} has no in-place form", NO_FORM)
    if not isinstance(norm, InPlaceABN) and (reason := trace.why_input_is_needed(node)):
        if not isinstance(norm, ABN):
            raise _UnsafeError(printable(reason), INPUT_NEEDED)
        plan.inplace = False
    return plan


def _plan_activation(trace: Trace, name: str, norm: nn.Module, node: fx.Node, kind: str) -> NormPlan:
    """Return the plan of a BatchNorm2d with the activation that it can take over; identity if there is none."""
    plan = NormPlan(name, norm, "identity", 0.01, True)
    last = next(iter(node.users)) if len(node.users) == 1 else None
    if kind != "standard" and last is not None and _is_activation(trace, last):
        _check_activation(trace, last)
    if last is not None and (form := _activation_of(trace.module_of(last))) and _removable(trace, last):
        plan.activation, plan.activation_param = form
        plan.absorbed = str(last.target)
    output = last if plan.absorbed is not None and last is not None else node
    overwriters = trace.overwriters(output)
    if overwriters and (kind != "standard" or plan.absorbed is not None):
        raise _UnsafeError(f"its output, which backward needs, is overwritten by {listed(overwriters)}", OVERWRITTEN)
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


def _check_activation(trace: Trace, node: fx.Node) -> None:
    """Raise _UnsafeError unless an in-place norm can take over the activation behind it."""
    module = trace.module_of(node)
    if module is None:
        raise _UnsafeError(f"its activation {printable(node.name)} is a function, which no module owns", FUNCTION)
    name = _described(str(node.target), module)
    if (_activation_of(module) or ("none", 0.0))[0] not in INVERTIBLE_ACTIVATIONS:
        raise _UnsafeError(f"its activation {name} has no in-place form", NO_FORM)
    if not _removable(trace, node):
        calls = len(trace.calls[str(node.target)])
        raise _UnsafeError(f"its activation {name} is called {calls} times, not for norms alone", SHARED)


def _removable(trace: Trace, node: fx.Node) -> bool:
    """Return whether every call of an activation module directly follows a BatchNorm2d that feeds nothing else."""
    return all(
        type(trace.module_of(call.all_input_nodes[0])) is nn.BatchNorm2d and len(call.all_input_nodes[0].users) == 1
        for call in trace.calls[str(node.target)]
    )


def _plan_scale(trace: Trace, plan: NormPlan, kind: str, allow_approximate: bool) -> None:
    """Plan how the signed scale of a standard norm becomes |weight| + eps; _UnsafeError where it cannot."""
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
            f"{KINDS[kind].__name__} is |weight| + eps",
            NO_SCALE,
        )


@torch.no_grad()
def _converted(plan: NormPlan, kind: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the new norm, with the parameters and buffers of the old one."""
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
    """Change the weight in place so that the new norm scales as the old one did, and negate filters for its sign."""
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
