"""Chains of invertible layers of which backward keeps the output only: the inputs are found again, layer by layer.

Source: Gomez et al., The Reversible Residual Network, 2017, Algorithm 1, in its form of four forward passes per step:
the graph that finding the input of a layer builds gives its gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from zoo.ops.recorded import is_autocast, is_transformed
from zoo.ops.replay import Autocast, RandomState

Tensors = tuple[Tensor, ...]
Gradients = dict[Tensor, Tensor]
Meter = Callable[[int, float], None]
HALF = (torch.float16, torch.bfloat16)


class Link(Protocol):
    """An invertible layer.

    One with a method ``steps() -> links`` is run by a chain as these links, made anew for each run: they may keep what
    their own ``reverse`` needs beside the outputs.
    """

    def __call__(self, *xs: Tensor) -> Any:
        """Return the outputs in a tuple, by operations that autograd differentiates."""

    def modules(self) -> Iterable[Any]:
        """Return the modules whose parameters and buffers, beside the inputs, the outputs depend on."""

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Any, Tensors, Gradients]:
        """Return the inputs, their gradients and those of the parameters; runs without gradients.

        A first link may return None for inputs.  With ``owned`` the memory of ``ys`` and ``grads`` may be overwritten.
        No two of the gradients returned may share an element.  Nothing that forward counts is to be counted again.
        """


def run_chain(links: Sequence[Any], *xs: Tensor, store: bool = False, meter: Meter | None = None) -> Tensors:
    """Return the outputs of ``links`` one after the other; backward keeps nothing else.

    Under autocast half-precision inputs are cast to float32.  The forward of the links runs once, without gradients;
    in backward it runs with its autocast state and its random numbers, which the outer stream of random numbers does
    not notice.  Modules must be in training or evaluation as they were, with the running statistics that they used;
    RuntimeError otherwise.  Gradients can be taken once, not twice.  Compiled graphs break at the chain, once.

    ``store`` keeps what autograd keeps instead; so do transforms of `torch.func`, and `torch.export`.  ``meter`` is
    called in backward with the number of each link and the relative error of its inputs, last link first; it costs the
    memory of all inputs.
    """
    if not all(isinstance(x, Tensor) for x in xs):  # stand-ins of torch.fx
        return _run(links, xs)
    if store or not torch.is_grad_enabled():
        return _run(links, _cast(xs))
    return _run_reversibly(links, xs, meter)


def _run(links: Iterable[Any], xs: Tensors) -> Tensors:
    for link in links:
        ys = link(*xs)
        xs = ys if isinstance(ys, tuple) else (ys,)
    return xs


def _cast(xs: Tensors) -> Tensors:
    """Return xs with what is in half precision under autocast in float32: the sums are rounded at every link."""
    return tuple(x.float() if x.dtype in HALF and is_autocast(x.device.type) else x for x in xs)


# All of it, so that the graphs break once. As torch.compiler.disable, but torch._dynamo, a second's work, is imported
# when the function is first called and not when this file is.
@torch._disable_dynamo
def _run_reversibly(links: Sequence[Any], xs: Tensors, meter: Meter | None) -> Tensors:
    xs = _cast(xs)
    if is_transformed() or torch.compiler.is_exporting():
        return _run(links, xs)
    if any(getattr(link, "_is_replica", False) for link in links):
        raise RuntimeError(
            "the copies that nn.DataParallel makes do not know their parameters, which a chain of invertible layers "
            "would not train; use DistributedDataParallel, or store"
        )
    steps = [(index, step) for index, link in enumerate(links) for step in _steps(link)]
    if not any(x.requires_grad for x in xs):  # what comes before the first parameter to train has no backward
        first = next((i for i, (_, step) in enumerate(steps) if _trained([step])), len(steps))
        with torch.no_grad():
            xs = _run([step for _, step in steps[:first]], xs)
        steps = steps[first:]
    if not steps:
        return xs
    parameters = _trained([step for _, step in steps])
    return _Chain.apply(steps, parameters, meter, len(xs), *xs, *parameters)


def _steps(link: Any) -> Sequence[Any]:
    return link.steps() if hasattr(link, "steps") else (link,)


def _modules(steps: Iterable[Any]) -> list[Any]:
    return [module for step in steps for module in step.modules()]


def _parameters(steps: Iterable[Any]) -> list[Tensor]:
    return [p for module in _modules(steps) for p in module.parameters(recurse=False)]


def _trained(steps: Iterable[Any]) -> list[Tensor]:
    """Return the parameters with gradients, each once."""
    return list(dict.fromkeys(p for p in _parameters(steps) if p.requires_grad))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: list[tuple[int, Any]],
        parameters: list[Tensor],
        meter: Meter | None,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensors:
        ctx.steps, ctx.parameters, ctx.meter = steps, parameters, meter
        xs = tensors[:num_inputs]
        ctx.autocast, ctx.random_states, ctx.inputs = Autocast.now(xs[0]), [], []
        state = RandomState.now(xs[0])
        for position, (index, step) in enumerate(steps):
            is_first = position == 0 or steps[position - 1][0] != index
            # Detached, as an input that a link hands on may become an output, and an output would keep itself alive.
            ctx.inputs.append([x.detach() for x in xs] if meter and is_first else None)
            xs = _run([step], xs)
            state, before = RandomState.now(xs[0]), state
            ctx.random_states.append(None if state.is_same(before) else before)
        modules = _modules(step for _, step in steps)
        ctx.training = [module.training for module in modules]
        used = [b for module in modules if not module.training for b in module.buffers(recurse=False)]
        ctx.save_for_backward(*xs, *parameters, *used)  # all but xs for torch to notice if they are changed
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        _check_modules([step for _, step in ctx.steps], ctx.parameters, ctx.training)
        outer = RandomState.now(grads[0]) if any(ctx.random_states) else None
        try:
            with ctx.autocast():
                xs_grads, gradients = _reverse(ctx, grads)
        finally:
            if outer is not None:
                outer.restore()
        return None, None, None, None, *xs_grads, *[gradients.get(parameter) for parameter in ctx.parameters]


def _check_modules(steps: Sequence[Any], parameters: Iterable[Tensor], training: Sequence[bool]) -> None:
    """Raise RuntimeError unless the links, which are run as they are now, are those of forward."""
    if not set(_parameters(steps)).issuperset(parameters):
        raise RuntimeError(
            "a chain of invertible layers had other parameters in forward than it has in backward, which runs the "
            "layers again; call backward while they are in place (inside torch.func.functional_call), or store"
        )
    if [module.training for module in _modules(steps)] != training:
        raise RuntimeError(
            "a chain of invertible layers was switched between training and evaluation after its forward pass; "
            "backward runs the layers again: switch after backward, or store"
        )


def _reverse(ctx: Any, grads: Tensors) -> tuple[Tensors, Gradients]:
    """Return the gradients of the chain's inputs and parameters."""
    gradients: Gradients = {}
    ys = ctx.saved_tensors[: len(grads)]
    foreign = _memory((*ys, *grads))  # may not be overwritten
    forward = list(zip(ctx.steps, ctx.random_states, ctx.inputs, strict=True))
    for (index, step), state, inputs in reversed(forward):
        if state is not None:
            state.restore()
        ys, grads, found = step.reverse(ys, grads, foreign.isdisjoint(_memory((*ys, *grads))))
        add_gradients(gradients, found)
        if inputs is not None:
            ctx.meter(index, _relative_error(ys, inputs))
    return grads, gradients


def add_gradients(gradients: Gradients, found: Gradients) -> None:
    """Add what was found to ``gradients``: a parameter may be used more than once."""
    for parameter, gradient in found.items():
        gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient


def _memory(tensors: Iterable[Tensor | None]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


def _relative_error(found: Iterable[Tensor | None], truth: Iterable[Tensor]) -> float:
    """Return ||found - truth|| / ||truth|| of what was found, 0 if nothing differs."""
    pairs = [(x.double(), true.double()) for x, true in zip(found, truth, strict=True) if x is not None]
    error = sum(float((x - true).square().sum()) for x, true in pairs)
    norm = sum(float(true.square().sum()) for _, true in pairs)
    return math.sqrt(error / norm) if error else 0.0


def reverse_coupling(
    branch: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    kept: Tensor,
    y: Tensor,
    grads: tuple[Tensor, Tensor],
    owned: bool,
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Return x of y = x + branch(kept), the gradient of ``kept`` and those of ``parameters`` (None: not used).

    ``grads`` are those of ``kept`` (without what this adds) and of y, which is also x's.  With ``owned`` y and the
    gradient of ``kept`` are overwritten.
    """
    dkept, dy = grads
    leaf = kept.detach().requires_grad_()
    with torch.enable_grad():
        added = branch(leaf)
    found: Sequence[Tensor | None] = [None] * (len(parameters) + 1)
    output = get_gradient_edge(added) if added.requires_grad else None
    x = y.sub_(added.detach()) if owned else y - added.detach()
    del added  # its memory is free while the branch runs backward
    if output is not None:
        found = torch.autograd.grad((output,), (leaf, *parameters), (dy,), allow_unused=True)
    if found[0] is not None:
        dkept = dkept.add_(found[0]) if owned else dkept + found[0]
    # A parameter that is added to the output as it is has dy itself as its gradient, which the next link may overwrite.
    passed = _memory((dy,))
    return x, dkept, [dp.clone() if dp is not None and passed & _memory((dp,)) else dp for dp in found[1:]]
