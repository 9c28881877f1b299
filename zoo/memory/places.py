"""Finds the module and the operation in which the values of two training steps first differ."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from zoo.memory.values import bits, elements_of
from zoo.torch_internals.data import tensors_of


class StepDigests:
    """Records digests of the outputs of modules and of the gradients of autograd nodes in a training step.

    Nodes are numbered from the loss. Each belongs to the innermost module that created it.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._names = {each: f"{name} ({type(each).__name__})".lstrip() for name, each in modules.items()}
        self.clear()

    def clear(self) -> None:
        """Forget the recorded step."""
        self._outputs: list[tuple[str, str, list[int]]] = []
        self._owners: dict[Any, str] = {}
        self._nodes: list[tuple[str, str]] = []  # owner and operation
        self._gradients: dict[int, list[int]] = {}  # number of a node -> digests, in the order of execution

    def __enter__(self) -> StepDigests:
        self._handle = module_hooks.register_module_forward_hook(self._record_outputs)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self._owners.clear()

    def _record_outputs(self, module: nn.Module, _: Any, output: Any) -> None:
        if module not in self._names or torch.compiler.is_compiling():
            return
        outputs = tensors_of(output)
        name = self._names[module]
        for each in outputs:
            for node in _nodes_from(each.grad_fn, self._owners):
                self._owners[node] = name
        operations = [each.grad_fn.name() for each in outputs if each.grad_fn is not None]
        self._outputs.append((name, operations[-1] if operations else "", [_digest(each) for each in outputs]))

    def begin_backward(self, loss: Tensor) -> None:
        """Register hooks that record the gradients of each node of the loss."""
        for number, node in enumerate(_nodes_from(loss.grad_fn, {})):
            self._nodes.append((self._owners.get(node, "the loss"), node.name()))
            node.register_hook(partial(self._record_gradients, number))

    def _record_gradients(self, number: int, gradients: Any, _: Any) -> None:
        self._gradients[number] = [_digest(each) for each in gradients if each is not None]

    def first_difference(self, other: StepDigests) -> str:
        """Return the module and operation of the first value that differs; "" if no recorded value differs."""
        for (name, operation, found), (other_name, _, others) in zip(self._outputs, other._outputs, strict=False):
            if name != other_name:
                break
            if found != others:
                return f"{name}, in forward: {operation.removesuffix('0').removesuffix('Backward')}"
        if self._nodes == other._nodes:
            for number, found in self._gradients.items():
                if found != other._gradients.get(number):
                    name, operation = self._nodes[number]
                    return f"{name}, in backward: {operation}"
        return ""


def _digest(tensor: Tensor) -> int:
    """Return a hash of the bits of a tensor."""
    return hash(bits(elements_of(tensor)).cpu().numpy().tobytes())


def _nodes_from(node: Any, known: Container[Any]) -> Iterator[Any]:
    """Yield an autograd node and the nodes that follow it in backward, up to known nodes."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in known:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]
