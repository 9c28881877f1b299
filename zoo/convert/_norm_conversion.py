"""Replaces the norms of any model with equivalent norms of another kind where this is safe."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zoo.convert._rewriting import activation_behind, drop_activations, set_mode, trace_forward
from zoo.convert._trace import TRANSPOSED_CONVOLUTIONS, Trace, describe_call, function_name
from zoo.errors import MAX_LISTED, ConversionError, escape, join_names
from zoo.layers.invertible import InvertibleNorm
from zoo.layers.norm import ABN, NORM_CLASSES, InPlaceABN, InPlaceABNSync
from zoo.ops.abn.functional import INVERTIBLE_ACTIVATIONS
from zoo.torch_internals.data import BatchNormBase

logger = logging.getLogger(__name__)

MAX_WARNED_NAMES = 3
LEAKY_RELU_SLOPE = 0.01  # slope of the leaky ReLU that replaces ReLU
PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Classes of timm and torchvision are listed by name, because these packages are optional.
NORMS_WITH_ACTIVATION = ("BatchNormAct2d", "SyncBatchNormAct")  # timm's norms that call their submodules drop and act
# These activations save their input for backward; their in-place functions save a copy.
ACTIVATIONS_THAT_SAVE_INPUT = ("SiLU", "Hardswish", "GELU", "GELUTanh", "Mish", "PReLU")
FUNCTIONS_THAT_SAVE_INPUT = ("silu", "hardswish", "gelu", "mish", "prelu")
OTHER_ACTIVATIONS = ("relu", "leaky_relu", "elu", "relu6", "selu", "celu", *FUNCTIONS_THAT_SAVE_INPUT)

# Reason why a norm cannot be converted -> remedy. The error lists the reasons next to the names.
SUBCLASS = "replace them with nn.BatchNorm2d, if they are equivalent"
SYNCHRONIZED = 'convert to "sync"'
NOT_ONCE = "give each call its own norm, and remove norms that are never called"
NOT_TRACED = "remove control flow that depends on tensor values from what cannot be traced"
DROPS = "remove the drop layer"
REPLACE_RELU = 'relu="leaky_relu" replaces it with leaky ReLU, which changes the outputs'
NO_FORM = "replace it with nn.LeakyReLU or nn.ELU and retrain, because the outputs change"
FUNCTION = "call a module (nn.LeakyReLU or nn.ELU), one per norm, instead of the function"
SHARED = "give each norm its own activation module"
OVERWRITTEN = (
    "write x = x + y instead of x += y, and set inplace=False in modules that overwrite the output of the norm"
)
INPUT_NEEDED = "let the other readers read the norm's output, if that is intended; or convert other submodules only"
NO_SCALE = "allow_approximate=True (zoo convert --allow-approximate) sets such scales to eps"
ALTERNATIVES = "partial=True converts the other norms; zoo.lean saves memory without conversion"


@dataclass
class NormPlan:
    """Plan for replacing one norm.

    Args:
    - `name`, `old`: the norm.
    - `activation`, `activation_param`, `inplace`: settings of the new norm.
    - `absorbed`: name of the activation module that the new norm takes over, if nothing else calls it.
    - `owner`: otherwise, name of the module whose forward method calls the activation and will be rewritten.
    - `follower`: an activation that is not absorbed: a submodule of the norm, or a module after it. It must not
      overwrite its input.
    - `producer`: name of the convolution or linear layer whose filters of ``num_negative`` negative scales are negated.
    - `num_clamped`: number of scales that cannot be represented and become eps.
    """

    name: str
    old: Any
    activation: str
    activation_param: float
    inplace: bool
    absorbed: str | None = None
    owner: str | None = None
    follower: nn.Module | None = None
    producer: str | None = None
    num_negative: int = 0
    num_clamped: int = 0


def convert_norm(
    module: nn.Module,
    kind: str,
    *,
    allow_approximate: bool = False,
    partial: bool = False,
    relu: str | None = None,
) -> nn.Module:
    """Replace every batch norm of ``module`` and its activation with a norm of the given kind; return ``module``.

    The outputs stay the same. Norms of this package, and timm's norms with activation, are replaced too.

    Args:
    - `module`: the network; modified in place, as by `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    - `kind`: "standard" (`ABN`), "inplace" or "sync".
    - `allow_approximate`: replace scales that cannot be represented with the nearest possible scale, eps.
    - `partial`: convert the norms that can be converted, and log a warning with the names of some others. A norm before
      a non-invertible activation that saves its input (SiLU, Hardswish, GELU, Mish, PReLU) then becomes in-place, too,
      but the activation does not: one of their two saved maps remains.
    - `relu`: "leaky_relu" replaces ReLU after in-place norms with leaky ReLU of slope 0.01. This changes the outputs.

    Parameters and buffers remain the same objects under the same names. The in-place scale is |weight| + eps, so eps is
    subtracted from the weights; for a negative weight, the signs of the running mean and of the filter before it are
    flipped. The filter belongs to a convolution, a transposed convolution, or a linear layer with output (N, C), that
    only the norm reads. Activation modules that a norm takes over become nn.Identity. If the activation is a function,
    or a module that is also called elsewhere, the forward method that calls it is rewritten without the call, as a
    torch.fx graph. Only `ABN` takes over relu, and only from modules that nothing else calls. An `ABN` whose input is
    still needed becomes an `InPlaceABN` with ``inplace = False``. Frozen norms of torchvision and timm are not
    replaced. The kind "standard" also leaves the norms of invertible layers (RevNeXt): in evaluation they are standard
    norms.

    The forward pass is traced with torch.fx. Raises ConversionError, with the norms, reasons and remedies, and leaves
    ``module`` unchanged if something else needs the input of a norm, its output is overwritten, its activation has no
    in-place form, or a scale cannot be represented (unless ``allow_approximate``). With ``partial`` it is raised only
    if no norm can be converted. It is also raised if there is no norm at all.
    """
    plans, left = plan_norms(module, kind, allow_approximate, partial, relu)
    if left:
        logger.warning(
            "%s: converted %d of %d norms, all but %s; partial=False raises an error with the reasons",
            type(module).__name__, len(plans), len(plans) + len(left), join_names(left, MAX_WARNED_NAMES),
        )  # fmt: skip
    apply_plans(module, plans, kind)
    return module


def plan_norms(
    module: nn.Module, kind: str, allow_approximate: bool = False, partial: bool = False, relu: str | None = None
) -> tuple[list[NormPlan], dict[str, str]]:
    """Plan `convert_norm` without changing anything.

    Returns a plan for each norm, and for each norm that cannot be converted its name and the reason. Raises the
    ConversionError of `convert_norm`.
    """
    if kind not in NORM_CLASSES:
        raise ConversionError(f"norm {kind!r} is not one of {', '.join(NORM_CLASSES)}")
    if relu not in (None, "leaky_relu") or (relu is not None and kind == "standard"):
        raise ConversionError(
            f'relu={relu!r} with norm {kind!r}; give None to keep ReLU, or "leaky_relu" with norm "inplace" or "sync"'
        )
    norms = {name: part for name, part in module.named_modules() if isinstance(part, (BatchNormBase, ABN))}
    if not norms:
        raise ConversionError(f"{type(module).__name__} has no norm to convert: neither of torch nor of zoo")
    norms = {name: norm for name, norm in norms.items() if type(norm) is not NORM_CLASSES[kind]}
    if kind == "standard":
        held = {id(layer.norm) for layer in module.modules() if isinstance(layer, InvertibleNorm)}
        norms = {name: norm for name, norm in norms.items() if id(norm) not in held}
    if not norms:
        return [], {}
    with set_mode(module, training=True):
        trace = Trace(module, in_parts=partial)
    planner = _Planner(trace, kind, partial, relu)
    plans, problems, advice = [], dict[str, str](), dict[str, None]()
    for name, norm in norms.items():
        try:
            plan = planner.plan(name, norm)
            _plan_scale(trace, plan, kind, allow_approximate)
        except _UnsafeError as error:
            problems[_described(name, norm)] = error.reason
            advice[error.advice] = None
        else:
            plans.append(plan)
    if problems and not (partial and plans):
        lines = [f"  {name}: {reason}" for name, reason in problems.items()]
        more = [f"  and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
        raise ConversionError(
            f"{len(problems)} of {len(norms)} norms of {type(module).__name__} cannot become "
            f"{NORM_CLASSES[kind].__name__}; nothing was converted:\n"
            + "\n".join(lines[:MAX_LISTED] + more)
            + "\nWhat to do:\n"
            + "\n".join(f"- {text}" for text in advice)
            + ("" if kind == "standard" or partial else f"\nOr keep these norms: {ALTERNATIVES}")
        )
    return plans, problems


def _described(name: str, part: nn.Module) -> str:
    return f"{escape(name) or 'the module itself'} ({type(part).__name__})"


def apply_plans(module: nn.Module, plans: list[NormPlan], kind: str) -> None:
    """Replace norms and activations in place, as planned by `plan_norms` for the same module."""
    modules = dict(module.named_modules())
    replaced: dict[int, nn.Module] = {}
    rewritten = defaultdict[str, list[str]](list)
    for plan in plans:
        replaced[id(plan.old)] = _converted(plan, kind, modules)
        if plan.absorbed is not None:
            replaced[id(modules[plan.absorbed])] = nn.Identity()
        if plan.owner is not None:
            rewritten[plan.owner].append(_local_name(plan.name, plan.owner))
        if plan.follower is not None and hasattr(plan.follower, "inplace") and kind != "standard":
            plan.follower.inplace = False  # type: ignore[assignment]
    replace_modules(module, replaced)
    for owner, names in rewritten.items():
        drop_activations(modules[owner], names)


def replace_modules(module: nn.Module, replaced: Mapping[int, nn.Module]) -> None:
    """Replace submodules of ``module`` under all their names. ``replaced`` maps ids of submodules to new modules."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
    if replaced and getattr(module, "built_as", None) is not None:
        module.built_as = None  # type: ignore[assignment]  # published weights no longer fit


def call_own_activation(norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Forward hook that applies the norm's own activation, as timm's norms do."""
    activated: Tensor = norm.get_submodule("act")(output)
    return activated


class _UnsafeError(Exception):
    """Reason why a norm cannot be converted, and the remedy."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class _Planner:
    """Plans the replacement of each norm of a traced module, except for its scale."""

    def __init__(self, trace: Trace, kind: str, partial: bool, relu: str | None) -> None:
        self.trace, self.partial = trace, partial
        self.in_place = kind != "standard"
        self.kind, self.relu = kind, relu
        self._recorded: dict[str, fx.Graph | str] = {}

    def plan(self, name: str, norm: Any) -> NormPlan:
        """Return the plan for one norm. Raises _UnsafeError if there is none."""
        calls = self.trace.calls.get(name, [])
        self._check_kind(norm)
        if not calls and (why := self.trace.untraced_reason(name)):
            raise _UnsafeError(escape(why), NOT_TRACED)
        if len(calls) != 1 or not name:
            raise _UnsafeError(f"the forward pass calls it {len(calls)} times, not once", NOT_ONCE)
        (node,) = calls
        if isinstance(norm, ABN):
            plan = NormPlan(name, norm, *norm.checked_activation(), getattr(norm, "inplace", True))
            plan.follower = norm._modules.get("act")
        elif _has_activation(norm):
            plan = self._plan_own_activation(name, norm, node)
        else:
            plan = self._plan_activation(name, norm, node)
        if not self.in_place:
            return plan
        if plan.activation not in INVERTIBLE_ACTIVATIONS:  # an ABN's activation; others were checked above
            raise _UnsafeError(f"its activation {plan.activation} has no in-place form", NO_FORM)
        if not isinstance(norm, InPlaceABN) and (reason := self.trace.input_needed_reason(node)):
            if not isinstance(norm, ABN):
                raise _UnsafeError(escape(reason), INPUT_NEEDED)
            plan.inplace = False
        return plan

    def _check_kind(self, norm: Any) -> None:
        if isinstance(norm, nn.SyncBatchNorm) and self.kind != "sync":
            raise _UnsafeError("it uses the statistics of all processes", SYNCHRONIZED)
        if (
            type(norm) not in PLAIN_NORMS
            and not (isinstance(norm, ABN) and type(norm).forward in (ABN.forward, InPlaceABN.forward))
            and type(norm).__name__ not in NORMS_WITH_ACTIVATION
        ):
            raise _UnsafeError(f"it is a subclass of {type(norm).__bases__[0].__name__} of unknown behavior", SUBCLASS)
        if type(norm).__name__ in NORMS_WITH_ACTIVATION and type(norm.drop) is not nn.Identity:
            raise _UnsafeError(f"it drops values with {type(norm.drop).__name__}", DROPS)

    def _plan_own_activation(self, name: str, norm: Any, node: fx.Node) -> NormPlan:
        """Return the plan for a norm of timm that includes its activation."""
        if form := self._form_of(_activation_of(norm.act)):
            self._check_not_overwritten(node)
            return NormPlan(name, norm, *form, inplace=True)
        if self.in_place and not self._saves_input(norm.act):
            raise _no_form(f"{name}.act", norm.act)
        return NormPlan(name, norm, "identity", LEAKY_RELU_SLOPE, True, follower=norm.act)

    def _plan_activation(self, name: str, norm: nn.Module, node: fx.Node) -> NormPlan:
        """Return the plan for a batch norm with the activation that it can take over, or with the identity."""
        plan = NormPlan(name, norm, "identity", LEAKY_RELU_SLOPE, True)
        last = next(iter(node.users)) if len(node.users) == 1 else None
        output = node
        if last is not None and self._is_activation(last):
            module = self.trace.module_of(last)
            found = _activation_of(module) if module is not None else _activation_of_function(last)
            form = self._form_of(found)
            if form and module is not None and self.trace.num_calls(last) == 1:
                plan.absorbed = str(last.target)
            elif form and self.in_place:
                plan.owner = self._owner(name, node, last)
            elif self.in_place and module is not None and self._saves_input(module):
                plan.follower = module
                return plan
            elif self.in_place and not (module is None and self._saves_input(last)):
                raise _no_form(str(last.target), module or last)
            if form and (plan.absorbed is not None or plan.owner is not None):
                plan.activation, plan.activation_param = form
                output = last
        if self.in_place or output is not node:
            self._check_not_overwritten(output)
        return plan

    def _is_activation(self, node: fx.Node) -> bool:
        module = self.trace.module_of(node)
        if module is not None:
            return type(module).__module__ == "torch.nn.modules.activation"
        return function_name(node).rstrip("_") in OTHER_ACTIVATIONS

    def _form_of(self, activation: tuple[str, float] | None) -> tuple[str, float] | None:
        """Return the new norm's form of an activation; None if the norm cannot take it over."""
        if activation is not None and activation[0] == "relu" and self.in_place:
            return None if self.relu is None else (self.relu, LEAKY_RELU_SLOPE)
        return activation

    def _saves_input(self, activation: nn.Module | fx.Node) -> bool:
        """Return whether an activation that no norm takes over may follow an in-place norm."""
        if isinstance(activation, nn.Module):
            return self.partial and type(activation).__name__ in ACTIVATIONS_THAT_SAVE_INPUT
        return self.partial and function_name(activation).rstrip("_") in FUNCTIONS_THAT_SAVE_INPUT

    def _owner(self, name: str, node: fx.Node, activation: fx.Node) -> str:
        """Return the name of the module whose forward method must be rewritten without the activation."""
        owner, module = str(node.meta["owner"]), self.trace.module_of(activation)
        what, advice = f"its activation {escape(describe_call(activation))} is a function", FUNCTION
        if module is not None:
            calls = self.trace.num_calls(activation)
            what = f"its activation {_described(str(activation.target), module)} is called {calls or 'several'} times"
            advice = SHARED
        described = _described(owner, self.trace.modules[owner])
        if activation.meta["owner"] != owner or not (owner == "" or name.startswith(f"{owner}.")):
            raise _UnsafeError(f"{what}, not in the forward pass of {described}, which calls the norm", advice)
        parent = self.trace.modules[owner]
        if owner not in self._recorded:
            self._recorded[owner] = trace_forward(parent)
        graph = self._recorded[owner]
        if isinstance(graph, str):
            raise _UnsafeError(
                f"{what}, and the forward pass of {described} cannot be rewritten: it {escape(graph)}", advice
            )
        found = activation_behind(parent, graph, _local_name(name, owner))
        same = found is not None and (
            found.target == activation.target
            if module is None
            else found.op == "call_module" and parent.get_submodule(str(found.target)) is module
        )
        if not same:
            raise _UnsafeError(f"{what}, which {described} does not call directly after the norm", advice)
        return owner

    def _check_not_overwritten(self, node: fx.Node) -> None:
        if overwriters := self.trace.overwriters(node):
            raise _UnsafeError(
                f"its output, which backward needs, is overwritten by {join_names(overwriters)}", OVERWRITTEN
            )


def _has_activation(norm: nn.Module) -> bool:
    return type(norm).__name__ in NORMS_WITH_ACTIVATION and type(norm.act) is not nn.Identity


def _local_name(name: str, owner: str) -> str:
    return name[len(owner) + 1 :] if owner else name


def _no_form(name: str, activation: nn.Module | fx.Node) -> _UnsafeError:
    """Return the error for an activation that no in-place norm can take over."""
    if isinstance(activation, nn.Module):
        is_relu, what = type(activation) is nn.ReLU, _described(name, activation)
    else:
        is_relu, what = function_name(activation).rstrip("_") == "relu", escape(describe_call(activation))
    return _UnsafeError(f"its activation {what} has no in-place form", REPLACE_RELU if is_relu else NO_FORM)


def _activation_of(module: nn.Module) -> tuple[str, float] | None:
    """Return name and parameter of an activation module that norms support; None for other modules."""
    if type(module) is nn.LeakyReLU and module.negative_slope > 0:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.ELU and module.alpha > 0:
        return "elu", module.alpha
    return ("relu", LEAKY_RELU_SLOPE) if type(module) is nn.ReLU else None


def _activation_of_function(node: fx.Node) -> tuple[str, float] | None:
    """Return `_activation_of` for a call of a function or method, such as F.leaky_relu."""
    name = function_name(node).rstrip("_")
    if name == "relu":
        return "relu", LEAKY_RELU_SLOPE
    if name not in ("leaky_relu", "elu"):
        return None
    argument, default = ("negative_slope", LEAKY_RELU_SLOPE) if name == "leaky_relu" else ("alpha", 1.0)
    value = node.kwargs.get(argument, node.args[1] if len(node.args) > 1 else default)
    return (name, float(value)) if isinstance(value, (int, float)) and value > 0 else None


def _plan_scale(trace: Trace, plan: NormPlan, kind: str, allow_approximate: bool) -> None:
    """Plan the scale |weight| + eps of an in-place norm. Raises _UnsafeError if the scale cannot be represented."""
    weight = plan.old.weight
    if kind == "standard" or isinstance(plan.old, InPlaceABN) or weight is None:
        return
    negative, small = weight < 0, weight.abs() < plan.old.eps
    plan.num_negative = int(negative.sum())
    if plan.num_negative:
        plan.producer = trace.producer_of(plan.name)
    stuck = negative & ~small if plan.producer is None else torch.zeros_like(negative)
    plan.num_clamped = int((small | stuck).sum())
    if plan.num_clamped and not allow_approximate:
        reasons = {
            f"{int(stuck.sum())} negative scales, and no layer before it that can take their signs": stuck.any(),
            f"{int(small.sum())} scales with |scale| < eps = {plan.old.eps:g}": small.any(),
        }
        raise _UnsafeError(
            f"{' and '.join(reason for reason, present in reasons.items() if present)}; the scale of "
            f"{NORM_CLASSES[kind].__name__} is |weight| + eps",
            NO_SCALE,
        )


@torch.no_grad()
def _converted(plan: NormPlan, kind: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Build the new norm with the parameters and buffers of the old norm."""
    old, layer = plan.old, NORM_CLASSES[kind]
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
        new.group = old.process_group if isinstance(old, nn.SyncBatchNorm) else getattr(old, "group", None)
    own_activation = old._modules.get("act")
    if own_activation is not None and (plan.follower is own_activation or isinstance(old, ABN)):
        new.act = own_activation
        new.register_forward_hook(call_own_activation)
    if isinstance(new, InPlaceABN) != isinstance(old, InPlaceABN) and old.weight is not None:
        _move_scale(plan, kind, modules)
    return new


def _move_scale(plan: NormPlan, kind: str, modules: Mapping[str, nn.Module]) -> None:
    """Change the weight in place so that the new norm has the old scale, and negate filters for negative scales."""
    old = plan.old
    if kind == "standard":
        old.weight.copy_(old.weight.abs() + old.eps)
        return
    scale: Tensor = old.weight.detach().clone()
    if plan.producer is not None:
        _negate_channels(modules[plan.producer], scale < 0)
        if old.running_mean is not None:
            old.running_mean[scale < 0] *= -1
        scale = scale.abs()
    old.weight.copy_((scale - old.eps).clamp(min=0))


def _negate_channels(layer: Any, negative: Tensor) -> None:
    """Negate output channels of a convolution or linear layer in place; ``negative`` has one bool per channel."""
    sign, weight = torch.where(negative, -1, 1), layer.weight
    if layer.bias is not None:
        layer.bias.mul_(sign)
    if isinstance(layer, TRANSPOSED_CONVOLUTIONS):  # weight: (groups x inputs per group, outputs per group, *kernel)
        weight.unflatten(0, (layer.groups, -1)).movedim((0, 2), (-2, -1)).mul_(sign.view(layer.groups, -1))
    else:
        weight.movedim(0, -1).mul_(sign)
