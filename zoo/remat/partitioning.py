"""Partitions the joint graph of a compiled network into forward and backward without redrawing random numbers.

torch restores the random number generator around nodes that a user's checkpoint marks as MUST_RECOMPUTE or
PREFER_RECOMPUTE, so that these may be recomputed. ``meta["nn_module_stack"]`` of a node ends with the path and the
class of the module that called the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zoo.errors import ConfigError, join_names
from zoo.torch_internals import (
    activation_memory_budget,
    current_activation_memory_budget,
    inductor_partitioner,
    is_higher_order,
    partition_by_min_cut,
    schema_of,
)

_SMALLEST_BUDGET = 1e-9
_OF_CHECKPOINTS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def random_saving_partitioner() -> Any:
    """Return `partition` as a partitioner for Inductor."""
    return inductor_partitioner(partition, __file__)


def partition(
    graph: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a joint ``graph``, whose random operations are marked.

    With an activation memory budget below 1, torch recomputes random operations like any other. Backward then draws a
    dropout mask that is not the one of forward, and gradients are wrong. Here random operations are marked MUST_SAVE:
    their outputs, or tensors computed from them, are saved. Inductor's random operations are functions of a seed
    of 8 bytes.

    Raises ConfigError if a random operation would be recomputed nevertheless.
    """
    random = [node for node in graph.graph.nodes if _is_random(node) and _recompute_policy(node) not in _OF_CHECKPOINTS]
    for node in random:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    layers = {node.name: _layers(node) for node in random}
    budget = current_activation_memory_budget()
    with activation_memory_budget(max(budget, _SMALLEST_BUDGET) if random else budget):
        forward, backward = partition_by_min_cut(graph, joint_inputs, **options)
    redrawn = _calls(forward) & _calls(backward) & layers.keys()
    if redrawn:
        names = join_names(dict.fromkeys(layer for name in layers if name in redrawn for layer in layers[name]))
        raise ConfigError(
            f"torch.compile would redraw the random numbers of {names} in backward, and gradients would be wrong; set "
            "the activation memory budget to 1, or use zoo.lean without torch.compile"
        )
    return forward, backward


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, itself or in a subgraph."""
    if node.op != "call_function":
        return False
    if is_higher_order(node.target):
        return any(map(_draws, node.args)) or any(
            _is_random(inner) for graph in _called_graphs(node) for inner in graph.graph.nodes
        )
    return _draws(node.target) and _dropout_p(node) != 0


def _draws(operator: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _called_graphs(node: fx.Node) -> list[fx.GraphModule]:
    owner = node.graph.owning_module
    arguments = [getattr(owner, str(arg.target)) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return [argument for argument in arguments if isinstance(argument, fx.GraphModule)]


def _dropout_p(node: fx.Node) -> Any:
    """Return the argument ``dropout_p`` of attention, which is deterministic at 0; None for other operations."""
    for index, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            return node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
    return None


def _recompute_policy(node: fx.Node) -> CheckpointPolicy | None:
    return node.meta.get("recompute")


def _calls(graph: fx.GraphModule) -> set[str]:
    """Return the names of the operations in a graph, without its inputs."""
    return {node.name for node in graph.graph.nodes if node.op == "call_function"}


def _layers(node: fx.Node) -> list[str]:
    """Return the layers that called a random operation, or those that use a seed of several layers."""
    found, seen, queue = [], {node}, [node]
    for each in queue:
        stack = each.meta.get("nn_module_stack")
        if stack and each.target is not torch.ops.prims.inductor_seeds.default:
            path, kind = list(stack.values())[-1]
            found.append(f"{path} ({getattr(kind, '__name__', kind)})")
            continue
        queue += (new := [user for user in each.users if user not in seen])
        seen.update(new)
    return found or [node.name]
