"""Chains of invertible layers. Backward reconstructs all activations from the outputs of the last layer.

A chain has two kinds of layers, see `Link`. Reversible blocks (Gomez et al. 2017) add a function of one half of the
channels to the other half. Invertible layers (Hascoet et al. 2023) have an inverse of their own.

Source: Gomez et al., The Reversible Residual Network, 2017, Algorithm 1. A training step costs as much as four forward
passes: the graph that reconstructs the input of a link also provides its gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.fx
from torch import Tensor

from zoo.errors import ConfigError
from zoo.ops.context import is_autocast, is_exporting, is_fx_proxy
from zoo.ops.grid import HALF, Digests, round_to_grid
from zoo.ops.recomputation import Autocast, ModuleState, Parameters, RandomState, has_no_state
from zoo.ops.second_derivatives import first_derivatives_only
from zoo.torch_internals.compiler import disable_compiler
from zoo.torch_internals.data import is_replica, storage_id
from zoo.torch_internals.dispatch import are_transforms_active

torch.fx.wrap("round_to_grid")

Tensors = tuple[Tensor, ...]
Gradients = dict[Tensor, Tensor]  # parameter -> gradient
ErrorCallback = Callable[[int, float], None]  # number of a block, relative error of its reconstructed inputs


class Link(Protocol):
    """One step of a chain: computes outputs from inputs, and in backward reconstructs the inputs from the outputs.

    A module that consists of several links, or has state per run, implements ``as_links()`` instead. It returns new
    links for each run of the chain.

    A link whose ``is_end`` is True only splits, joins or appends streams; at the ends of a chain, such links are not
    numbered. A link that replaces a single input may have a ``summary`` of its latest call on a grid
    (`zoo.ops.grid.sum_on_grid`).
    """

    def __call__(self, *xs: Tensor) -> Any:
        """Return the outputs, one tensor or a tuple, computed by differentiable operations."""

    def modules(self) -> Iterable[Any]:
        """Return the modules whose parameters and buffers the outputs depend on."""
        return ()

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Any, Tensors, Gradients]:
        """Return the inputs, their gradients and the gradients of the parameters. Called under `torch.no_grad`.

        The first link of a chain may return None for its inputs. With ``may_overwrite`` the link may reuse the memory
        of ``ys`` and ``grads``. The returned gradients must not overlap in memory. Counters that advance in forward,
        such as a norm's number of batches, must not advance again.
        """


class _Entry(NamedTuple):
    """A link, the number of its block (None at the ends of the chain), and whether it is the block's first link."""

    link: Link
    block: int | None
    is_first: bool


def run_chain(
    links: Sequence[Any],
    *xs: Tensor,
    store: bool = False,
    meter: ErrorCallback | None = None,
    grid_bits: int | None = None,
) -> Tensors:
    """Run ``links`` one after the other and return the outputs of the last, the only tensors saved for backward.

    Under autocast, half-precision inputs are cast to float32. Forward runs without gradients. Backward recomputes it
    with the autocast state, the random numbers and the module state (`zoo.ops.recomputation`) of forward, and then
    restores what the caller had. Modules must have the same mode (training or evaluation) and parameters in backward as
    in forward. There are no second derivatives. Compiled graphs break once per chain.

    Args:
    - `links`: see `Link`.
    - `xs`: the inputs of the first link.
    - `store`: save activations like autograd. Always on in transforms of `torch.func` and in `torch.export`.
    - `meter`: called in backward with the number of each block and the relative error of its reconstructed inputs, last
      block first. Needs the memory of the inputs of all blocks.
    - `grid_bits`: round the inputs to multiples of 2^-grid_bits. Links that round their summands to the same grid can
      then be inverted exactly (`zoo.ops.grid`). Backward compares digests of the reconstructed inputs with forward's.

    Raises RuntimeError if FSDP2 has sharded the parameters of a single link, because nothing would gather them here;
    in backward, if modules have changed since forward. Raises ConfigError if a block has another ``grid_bits``, or the
    inputs are in half precision with it. Raises VerificationError in backward if a reconstruction is not exact.
    """
    for number, block in enumerate(link for link in links if not _is_end(link)):
        if (of_block := getattr(block, "grid_bits", None)) != grid_bits:
            raise ConfigError(
                f"grid_bits is {grid_bits} for a chain, but {of_block} for its block {number} ({type(block).__name__})",
                remedy="pass grid_bits to ReversibleSequential, which sets its blocks; invertible layers have none",
            )
    if any(map(is_fx_proxy, xs)):
        return _run(links, xs if grid_bits is None else _inputs_on_grid(xs, grid_bits))
    if any(hasattr(parameter, "full_tensor") for parameter in _parameters(links)):  # a DTensor
        raise RuntimeError(
            "fully_shard was applied to a block of a chain of reversible or invertible layers; the chain does not call "
            "its blocks as modules, so their parameters would not be gathered: apply fully_shard to the whole network"
        )
    if store or not torch.is_grad_enabled():
        return _run(links, _streams(xs, grid_bits))
    return _run_reversibly(links, xs, meter, grid_bits)


def _run(links: Iterable[Any], xs: Tensors) -> Tensors:
    for link in links:
        ys = link(*xs)
        xs = ys if isinstance(ys, tuple) else (ys,)
    return xs


def _streams(xs: Tensors, grid_bits: int | None) -> Tensors:
    """Cast xs to float32 under autocast, where half precision would round the sum at every link.

    With ``grid_bits``, rounds xs to the grid, and raises ConfigError for half precision.
    """
    xs = tuple(x.float() if x.dtype in HALF and is_autocast(x.device.type) else x for x in xs)
    if grid_bits is None:
        return xs
    for x in xs:
        if x.dtype in HALF:
            raise ConfigError(
                f"grid_bits = {grid_bits} needs streams in single precision, got {x.dtype}",
                remedy="keep the network in float32 and use torch.autocast",
            )
    return _inputs_on_grid(xs, grid_bits)


def _inputs_on_grid(xs: Tensors, grid_bits: int) -> Tensors:
    """Round xs to the grid. Replaces negative zeros, because subtraction cannot reconstruct them."""
    return tuple(round_to_grid(x, grid_bits) + 0.0 for x in xs)


def _is_end(link: Any) -> bool:
    return getattr(link, "is_end", False)


# Decorates the whole function, so that a compiled graph breaks once.
@disable_compiler
def _run_reversibly(links: Sequence[Any], xs: Tensors, meter: ErrorCallback | None, grid_bits: int | None) -> Tensors:
    xs = _streams(xs, grid_bits)
    if are_transforms_active() or is_exporting():
        return _run(links, xs)
    if any(map(is_replica, links)):
        raise RuntimeError(
            "the replicas of nn.DataParallel have no parameters, so a chain of invertible layers would not train; use "
            "DistributedDataParallel, or run the chain with store=True"
        )
    entries, numbers = [], itertools.count()
    for module in links:
        block = None if _is_end(module) else next(numbers)
        parts = module.as_links() if hasattr(module, "as_links") else (module,)
        entries += [_Entry(link, block, is_first=position == 0) for position, link in enumerate(parts)]
    num_blocks = next(numbers)
    if not any(x.requires_grad for x in xs):  # links before the first trained parameter need no backward
        first = next((i for i, entry in enumerate(entries) if _trained([entry.link])), len(entries))
        with torch.no_grad():
            xs = _run([entry.link for entry in entries[:first]], xs)
        entries = entries[first:]
    if not entries:
        return xs
    # Autograd holds the output and its gradient until the node's backward returns. The last link is a separate node, so
    # that both are freed before the other links are inverted.
    before, last = entries[:-1], entries[-1:]
    handover: _Handover | None = [] if before else None
    for part in filter(None, (before, last)):
        parameters = _trained(entry.link for entry in part)
        digests = None if grid_bits is None else Digests(grid_bits, [entry.block for entry in part], num_blocks)
        xs = _Chain.apply(part, parameters, meter, digests, handover, part is last, len(xs), *xs, *parameters)
    return xs


# The backward of the last link passes this once to the backward of the other links: reconstructed inputs, their
# gradients, and the ids of the storages that the caller holds. Autograd gets expanded zeros instead of the gradients,
# because it would hold them until all other links are inverted.
_Handover = list[tuple[Tensors, Tensors, set[int]]]


class _Chain(torch.autograd.Function):
    """The last link of a chain, or all links before it. The ``handover`` connects the two; None for a single link."""

    @staticmethod
    def forward(
        ctx: Any,
        entries: list[_Entry],
        parameters: list[Tensor],
        meter: ErrorCallback | None,
        digests: Digests | None,
        handover: _Handover | None,
        is_last: bool,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensors:
        ctx.entries, ctx.parameters, ctx.meter, ctx.digests = entries, parameters, meter, digests
        ctx.handover, ctx.is_last = handover, is_last
        xs = tensors[:num_inputs]
        ctx.autocast, ctx.random_states, ctx.module_states, ctx.inputs = Autocast.now(xs[0]), [], [], []
        state = RandomState.now(xs[0])
        for link, block, is_first in entries:
            # Detached: a link may return its input, and a saved output would keep itself alive.
            ctx.inputs.append([x.detach() for x in xs] if meter and is_first and block is not None else None)
            module_state = ModuleState(link.modules())
            inputs, xs = xs, _run([link], xs)
            module_state.finish()
            ctx.module_states.append(module_state)
            if digests is not None:
                digests.record(link, inputs, xs, compared=not _is_end(link))
            del inputs
            state, before = RandomState.now(xs[0]), state
            ctx.random_states.append(None if state.is_same(before) else before)
        modules = _modules(entry.link for entry in entries)
        ctx.training = [module.training for module in modules]
        ctx.all_parameters = Parameters(p for module in modules for p in module.parameters(recurse=False))
        norms = [module for module in modules if not module.training and has_no_state(module)]
        used = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        # Backward reads xs only. Parameters and buffers are saved so that torch raises an error if they were modified.
        ctx.save_for_backward(*(xs if is_last else ()), *parameters, *used)
        return xs

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Invert the links from last to first, and compute the gradients of each."""
        _check_modules([entry.link for entry in ctx.entries], ctx.parameters, ctx.training)
        ys = ctx.saved_tensors[: len(grads)]
        ctx.all_parameters.check()
        if ctx.is_last:
            held_by_caller = storage_ids((*ys, *grads))
        else:
            ys, grads, held_by_caller = ctx.handover.pop()
        gradients: Gradients = {}
        found: dict[int, Tensor] = {}  # index of a link -> digests of its reconstructed inputs
        state_of_caller = RandomState.now(grads[0]) if any(ctx.random_states) else None
        try:
            with ctx.autocast():
                forward = zip(ctx.entries, ctx.random_states, ctx.module_states, ctx.inputs, strict=True)
                for index, (entry, random_state, module_state, true_inputs) in reversed(list(enumerate(forward))):
                    if random_state is not None:
                        random_state.restore()
                    held_by_caller &= storage_ids((*ys, *grads))  # must not be overwritten
                    with module_state.restore():
                        ys, grads, parameter_gradients = entry.link.reverse(ys, grads, may_overwrite=not held_by_caller)
                    add_gradients(gradients, parameter_gradients)
                    if true_inputs is not None:
                        ctx.meter(entry.block, _relative_error(ys, true_inputs))
                    if ctx.digests is not None:
                        found.update(ctx.digests.digests_of(index, entry.link, ys))
        finally:
            if state_of_caller is not None:
                state_of_caller.restore()
        if ctx.digests is not None:
            ctx.digests.compare(found)
        if ctx.is_last and ctx.handover is not None:
            ctx.handover.append((ys, grads, held_by_caller))
            grads = tuple(grad.new_zeros(()).expand_as(grad) for grad in grads)
        return *[None] * 7, *grads, *[gradients.get(parameter) for parameter in ctx.parameters]


def add_gradients(gradients: Gradients, others: Gradients) -> None:
    """Accumulate ``others`` into ``gradients``; several links may share a parameter."""
    for parameter, gradient in others.items():
        gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient


def storage_ids(tensors: Iterable[Tensor | None]) -> set[int]:
    """Return the ids of the tensors' storages. Tensors that share memory have the same id."""
    return {storage_id(tensor.untyped_storage()) for tensor in tensors if tensor is not None}


def _modules(links: Iterable[Link]) -> list[Any]:
    return [module for link in links for module in link.modules()]


def _parameters(links: Iterable[Link]) -> list[Tensor]:
    return [p for module in _modules(links) for p in module.parameters(recurse=False)]


def _trained(links: Iterable[Link]) -> list[Tensor]:
    """Return the parameters that require gradients, without duplicates."""
    return list(dict.fromkeys(p for p in _parameters(links) if p.requires_grad))


def _check_modules(links: Sequence[Link], parameters: Iterable[Tensor], training: Sequence[bool]) -> None:
    """Raise RuntimeError if parameters or modes changed since forward: backward runs the links again."""
    if not set(_parameters(links)).issuperset(parameters):
        raise RuntimeError(
            "the parameters of a chain of invertible layers were replaced between forward and backward, which runs the "
            "layers again; call backward inside torch.func.functional_call, or run the chain with store=True"
        )
    if [module.training for module in _modules(links)] != training:
        raise RuntimeError(
            "a chain of invertible layers was switched between training and evaluation after its forward pass, but "
            "backward runs the layers again; switch after backward, or run the chain with store=True"
        )


def _relative_error(reconstructed: Iterable[Tensor | None], truth: Iterable[Tensor]) -> float:
    """Return ||reconstructed - truth|| / ||truth|| over the tensors that are not None; 0 if nothing differs."""
    pairs = [(x.double(), true.double()) for x, true in zip(reconstructed, truth, strict=True) if x is not None]
    error = sum(float((x - true).square().sum()) for x, true in pairs)
    norm = sum(float(true.square().sum()) for _, true in pairs)
    return math.sqrt(error / norm) if error else 0.0
