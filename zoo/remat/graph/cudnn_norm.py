"""cuDNN's batch norm as an operator that torch.compile keeps.

Eager training on CUDA calls cuDNN's batch norm where it can. AOTAutograd replaces it by torch's own before autograd,
which rounds differently. `with_kept_norms` replaces the batch norms of a graph that runs as eager kernels by
`batch_norm`, which AOTAutograd traces as an operator that calls cuDNN.

Tested by tests/remat/test_cudnn_norm.py.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from zoo.ops.operators import operator
from zoo.torch_internals.compiler import chooses_cudnn, cudnn_reserve_bytes
from zoo.torch_internals.data import suggest_memory_format

aten = torch.ops.aten
LIBRARY = torch.library.Library("zoo_remat", "FRAGMENT")


def with_kept_norms(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph of Dynamo, whose batch norms are functions whose cuDNN operator AOTAutograd keeps."""
    graph = copy.copy(graph)  # shares the parameters
    graph.graph = copy.deepcopy(graph.graph)
    replaced = {F.batch_norm: batch_norm, torch.batch_norm: _torch_batch_norm}
    for node in graph.graph.nodes:
        node.target = replaced.get(node.target, node.target) if node.op == "call_function" else node.target
    graph.recompile()
    return graph


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `F.batch_norm` of the same arguments, with the bits of eager training while AOTAutograd traces."""
    if not chooses_cudnn(x, weight, bias, running_mean, running_var, training, eps):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    arguments = x, weight, bias, running_mean, running_var, training, momentum, eps
    out, new_mean, new_var = _CudnnBatchNorm.apply(*arguments)
    if training and running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.copy_(new_mean)
            running_var.copy_(new_var)
    return out


def _torch_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


class _CudnnBatchNorm(torch.autograd.Function):
    """Returns the output and the new running statistics, which are empty if there are none or in evaluation mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous(memory_format=suggest_memory_format(x))
        out, mean, invstd, reserve, *running = CUDNN_BATCH_NORM(x, weight, *rest)
        _, *old, ctx.is_training, _, ctx.eps = rest
        ctx.save_for_backward(x, weight, mean, invstd, reserve, *(() if ctx.is_training else old))
        ctx.mark_non_differentiable(*running)
        return out, *running

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, invstd, reserve, *running = ctx.saved_tensors
        if ctx.is_training:
            grad = grad.contiguous(memory_format=suggest_memory_format(x))
            gradients = torch.ops.zoo_remat.cudnn_batch_norm_backward(x, grad, weight, mean, invstd, ctx.eps, reserve)
        else:  # as autograd does
            arguments = grad, x, weight, *running, mean, invstd, False, ctx.eps
            gradients = aten.native_batch_norm_backward(*arguments, list(ctx.needs_input_grad[:3]))
        return *gradients, None, None, None, None, None


def _new_results(
    x: Tensor, weight: Tensor, bias: Any, running_mean: Any, running_var: Any, training: bool, *_: Any
) -> Any:
    reserve = x.new_empty(cudnn_reserve_bytes(x, training), dtype=torch.uint8)
    statistics = (torch.empty_like(weight) if training else weight.new_empty(0) for _ in range(2))
    old = running_mean, running_var
    running = (torch.empty_like(each) if training and each is not None else weight.new_empty(0) for each in old)
    return torch.empty_like(x), *statistics, reserve, *running


@operator(
    LIBRARY,
    "cudnn_batch_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,"
    " float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _new_results,
)
def _run_cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    old = running_mean, running_var
    running = [each.clone() if training and each is not None else each for each in old]
    outputs = aten.cudnn_batch_norm(x, weight, bias, *running, training, momentum, eps)
    return *outputs, *(weight.new_empty(0) if each is None or not training else each for each in running)


@operator(
    LIBRARY,
    "cudnn_batch_norm_backward(Tensor x, Tensor grad, Tensor weight, Tensor mean, Tensor invstd, float eps,"
    " Tensor reserve) -> (Tensor, Tensor, Tensor)",
    lambda x, grad, weight, *_: (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)),
)
def _run_cudnn_batch_norm_backward(
    x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, eps: float, reserve: Tensor
) -> Any:
    # cuDNN may overwrite its reserve; autograd passes a copy too.
    return aten.cudnn_batch_norm_backward(x, grad, weight, None, None, mean, invstd, eps, reserve.clone())


CUDNN_BATCH_NORM = torch.ops.zoo_remat.cudnn_batch_norm.default


def recompute(x: Tensor, weight: Tensor, bias: Tensor | None, momentum: float, eps: float) -> Tensor:
    """Return the output of cuDNN's training-mode batch norm, without running statistics."""
    out: Tensor = aten.cudnn_batch_norm(x, weight, bias, None, None, True, momentum, eps)[0]
    return out
