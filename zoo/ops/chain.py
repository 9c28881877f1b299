"""Chains of layers that are undone one after the other, so that backward keeps only the last layer's outputs.

Two kinds of layers can be undone, see `Link`. Reversible blocks (Gomez et al. 2017) add a function of one half of the
channels to the other half. Invertible layers (Hascoet et al. 2023) have an inverse each.

Source: Gomez et al., The Reversible Residual Network, 2017, Algorithm 1. A step costs as much as four forward
passes, because the graph that is built to reconstruct the input of a link also gives the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops.context import Autocast, RandomState, is_autocast, is_exporting, is_fx_proxy, is_transformed
from zoo.torch_internals import disable_compiler, is_replica, storage_id

Tensors = tuple[Tensor, ...]
Gradients = dict[Tensor, Tensor]  # of parameters
Meter = Callable[[int, float], None]
HALF = (torch.float16, torch.bfloat16)


class Link(Protocol):
    """One step of a chain: it computes outputs from inputs, and in backward reconstructs the inputs from the outputs.

    A module that is more than one link, or remembers something for each run, has a method ``as_links()`` instead, which
    returns new links for each run of the chain. These are the links of the package::

        zoo.layers.reversible                         links of two tensors, the halves of the channels
            ReversibleBlock.as_links() -> 2 CouplingHalf    adds f(x2) to x1, then g(y1) to x2
            PairPool, ShiftBlock                            pool and block of i-RevNets
            _Halve, _Join                                   one tensor -> its halves, and back: both ends of the chain
        zoo.layers.invertible                         links of one tensor
            Invertible.as_links() -> 1 LayerCall            remembers what undoing this call needs, of a
                ChannelPool, BatchPool, InvertibleLeakyReLU, InvertibleNorm, InvertibleConv, LayerwiseBlock,
                Stem, GlobalMax                             the last two are both ends of the chain
    """

    def __call__(self, *xs: Tensor) -> Any:
        """Return the outputs, one tensor or a tuple, by operations that autograd differentiates."""

    def modules(self) -> Iterable[Any]:
        """Return the modules whose parameters and buffers, beside the inputs, the outputs depend on."""

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Any, Tensors, Gradients]:
        """Return the inputs, their gradients and those of the parameters; runs without gradients.

        The first link of a chain may return None for its inputs. With ``may_overwrite`` the memory of ``ys`` and
        ``grads`` may be overwritten. No two of the gradients returned may share an element. What forward counts,
        such as the batches of a norm, is not counted again.
        """


def run_chain(links: Sequence[Any], *xs: Tensor, store: bool = False, meter: Meter | None = None) -> Tensors:
    """Return the outputs of ``links``, run one after the other; backward keeps nothing else.

    Under autocast half-precision inputs are cast to float32. The forward of the links runs once, without gradients; in
    backward it runs with its autocast state and its random numbers, and the caller's random numbers stay as they are.
    Modules must be in the same mode (training or evaluation) as in forward, with the same running statistics;
    RuntimeError otherwise. Gradients can be taken once, not twice. Compiled graphs break at the chain, once.

    Args:
    - `links`: see `Link`.
    - `xs`: the inputs of the first link.
    - `store`: keep what autograd keeps instead. This is always done in transforms of `torch.func` and in
      `torch.export`.
    - `meter`: called in backward with the number of each link and the relative error of its inputs, last link first;
      it costs the memory of all inputs.

    Raises RuntimeError for a link whose own parameters FSDP2 has sharded, as it would not gather them here.
    """
    if any(map(is_fx_proxy, xs)):
        return _run(links, xs)
    if any(hasattr(parameter, "full_tensor") for parameter in _parameters(links)):  # a DTensor
        raise RuntimeError(
            "fully_shard was called with a block of a chain of reversible or invertible layers, whose parameters are "
            "not gathered, as the chain does not call its blocks as modules; call fully_shard with the network"
        )
    if store or not torch.is_grad_enabled():
        return _run(links, _without_half(xs))
    return _run_reversibly(links, xs, meter)


def _run(links: Iterable[Any], xs: Tensors) -> Tensors:
    for link in links:
        ys = link(*xs)
        xs = ys if isinstance(ys, tuple) else (ys,)
    return xs


def _without_half(xs: Tensors) -> Tensors:
    """Return xs; under autocast in float32 instead of half precision, which would round the sum at every link."""
    return tuple(x.float() if x.dtype in HALF and is_autocast(x.device.type) else x for x in xs)


# The decorator is on the whole function, so that compiled graphs break once.
@disable_compiler
def _run_reversibly(links: Sequence[Any], xs: Tensors, meter: Meter | None) -> Tensors:
    xs = _without_half(xs)
    if is_transformed() or is_exporting():
        return _run(links, xs)
    if any(map(is_replica, links)):
        raise RuntimeError(
            "the copies that nn.DataParallel makes do not know their parameters, which a chain of invertible layers "
            "would not train; use DistributedDataParallel, or store"
        )
    numbered: list[tuple[int | None, Link]] = [  # the first link of each module has its number
        (number if position == 0 else None, link)
        for number, module in enumerate(links)
        for position, link in enumerate(module.as_links() if hasattr(module, "as_links") else (module,))
    ]
    if not any(x.requires_grad for x in xs):  # links before the first trained parameter have no backward
        first = next((i for i, (_, link) in enumerate(numbered) if _trained([link])), len(numbered))
        with torch.no_grad():
            xs = _run([link for _, link in numbered[:first]], xs)
        numbered = numbered[first:]
    if not numbered:
        return xs
    # Autograd keeps the output and its gradient, which belong to the caller, until a node has run backward. The last
    # link is therefore a node of its own, so that both may be freed before the others are undone.
    before, last = numbered[:-1], numbered[-1:]
    handover = _Handover() if before else None
    for part in filter(None, (before, last)):
        parameters = _trained(link for _, link in part)
        xs = _Chain.apply(part, parameters, meter, handover, part is last, len(xs), *xs, *parameters)
    return xs


class _Handover:
    """What the last link of a chain finds again in backward: the outputs of the links before it, and their gradients.

    Autograd, which would keep the gradients until all other links are undone, gets zeros without memory in their place.
    """

    found: tuple[Tensors, Tensors, set[int]]  # tensors, their gradients, addresses of storages that the caller has

    def take(self) -> tuple[Tensors, Tensors, set[int]]:
        """Return what was found, and keep it no longer."""
        found = self.found
        del self.found
        return found


class _Chain(torch.autograd.Function):
    """The last link of a chain, or all before it; the ``handover`` is between the two, None if the link is alone."""

    @staticmethod
    def forward(
        ctx: Any,
        numbered: list[tuple[int | None, Link]],
        parameters: list[Tensor],
        meter: Meter | None,
        handover: _Handover | None,
        is_last: bool,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensors:
        ctx.numbered, ctx.parameters, ctx.meter = numbered, parameters, meter
        ctx.handover, ctx.is_last = handover, is_last
        xs = tensors[:num_inputs]
        ctx.autocast, ctx.random_states, ctx.inputs = Autocast.now(xs[0]), [], []
        state = RandomState.now(xs[0])
        for number, link in numbered:
            # Detached, because a link may pass an input on as an output, and an output would keep itself alive.
            ctx.inputs.append([x.detach() for x in xs] if meter and number is not None else None)
            xs = _run([link], xs)
            state, before = RandomState.now(xs[0]), state
            ctx.random_states.append(None if state.is_same(before) else before)
        modules = _modules(link for _, link in numbered)
        ctx.training = [module.training for module in modules]
        used = [b for module in modules if not module.training for b in module.buffers(recurse=False)]
        # Parameters and buffers are saved for torch to notice if they are changed; backward reads xs only.
        ctx.save_for_backward(*(xs if is_last else ()), *parameters, *used)
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Go from the last link to the first; reconstruct the inputs of each and compute its gradients."""
        _check_modules([link for _, link in ctx.numbered], ctx.parameters, ctx.training)
        ys = ctx.saved_tensors[: len(grads)]
        if ctx.is_last:
            seen_by_caller = storage_ids((*ys, *grads))
        else:
            ys, grads, seen_by_caller = ctx.handover.take()
        gradients: Gradients = {}
        state_of_caller = RandomState.now(grads[0]) if any(ctx.random_states) else None
        try:
            with ctx.autocast():
                forward = list(zip(ctx.numbered, ctx.random_states, ctx.inputs, strict=True))
                for (number, link), random_state, true_inputs in reversed(forward):
                    if random_state is not None:
                        random_state.restore()
                    seen_by_caller &= storage_ids((*ys, *grads))  # may not be overwritten
                    ys, grads, of_parameters = link.reverse(ys, grads, may_overwrite=not seen_by_caller)
                    add_gradients(gradients, of_parameters)
                    if true_inputs is not None:
                        ctx.meter(number, _relative_error(ys, true_inputs))
        finally:
            if state_of_caller is not None:
                state_of_caller.restore()
        if ctx.is_last and ctx.handover is not None:
            ctx.handover.found = ys, grads, seen_by_caller
            grads = tuple(grad.new_zeros(()).expand_as(grad) for grad in grads)
        return *[None] * 6, *grads, *[gradients.get(parameter) for parameter in ctx.parameters]


def add_gradients(gradients: Gradients, others: Gradients) -> None:
    """Add ``others`` to ``gradients``, which may have the same parameters: one may be used more than once."""
    for parameter, gradient in others.items():
        gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient


def storage_ids(tensors: Iterable[Tensor | None]) -> set[int]:
    """Return the ids of the tensors' storages; tensors that share memory have the same id."""
    return {storage_id(tensor.untyped_storage()) for tensor in tensors if tensor is not None}


def _modules(links: Iterable[Link]) -> list[Any]:
    return [module for link in links for module in link.modules()]


def _parameters(links: Iterable[Link]) -> list[Tensor]:
    return [p for module in _modules(links) for p in module.parameters(recurse=False)]


def _trained(links: Iterable[Link]) -> list[Tensor]:
    """Return the parameters with gradients, each once."""
    return list(dict.fromkeys(p for p in _parameters(links) if p.requires_grad))


def _check_modules(links: Sequence[Link], parameters: Iterable[Tensor], training: Sequence[bool]) -> None:
    """Raise RuntimeError if the links have changed since forward; backward runs them as they are now."""
    if not set(_parameters(links)).issuperset(parameters):
        raise RuntimeError(
            "a chain of invertible layers had other parameters in forward than it has in backward, which runs the "
            "layers again; call backward while they are in place (inside torch.func.functional_call), or store"
        )
    if [module.training for module in _modules(links)] != training:
        raise RuntimeError(
            "a chain of invertible layers was switched between training and evaluation after its forward pass; "
            "backward runs the layers again: switch after backward, or store"
        )


def _relative_error(reconstructed: Iterable[Tensor | None], truth: Iterable[Tensor]) -> float:
    """Return ||reconstructed - truth|| / ||truth|| over the tensors that are not None, 0 if nothing differs."""
    pairs = [(x.double(), true.double()) for x, true in zip(reconstructed, truth, strict=True) if x is not None]
    error = sum(float((x - true).square().sum()) for x, true in pairs)
    norm = sum(float(true.square().sum()) for _, true in pairs)
    return math.sqrt(error / norm) if error else 0.0
