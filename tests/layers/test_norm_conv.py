"""A norm and convolution that recompute the map between them equal the two modules."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.dist.spawn import run_distributed
from tests.formula import activated_batch_norm, relative_error, worst_error
from zoo.layers import ABN, InPlaceABN, InPlaceABNSync, freeze_norms
from zoo.layers.dense import norm_conv
from zoo.torch_internals.data import ALL_GATHER


def pair(norm=InPlaceABN, **settings):
    """Return a norm of 5 channels with uneven parameters and statistics, and a 3x3 convolution, in float64."""
    torch.manual_seed(0)
    layer = norm(5, **settings).double()
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return layer, nn.Conv2d(5, 4, 3, padding=1).double()


def parts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, c, 6, 5, generator=generator, dtype=torch.float64).requires_grad_() for c in (2, 3)]


def outcome(call, norm, conv, inputs):
    """Return the output of ``call``, all gradients, and the norm's buffers."""
    out = call(norm, conv, *inputs)
    leaves = [p for p in (*norm.parameters(), *conv.parameters(), *inputs) if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), leaves), *norm.buffers()]


def unfused(norm, conv, *inputs):
    return conv(norm(torch.cat(inputs, 1)))


def recomputes(out):
    return type(out.grad_fn).__name__ == "_NormActConvBackward"


@pytest.mark.parametrize("state", ["training", "evaluation", "frozen", "no statistics", "cumulative"])
@pytest.mark.parametrize("norm", [InPlaceABN, InPlaceABNSync])
def test_outputs_gradients_and_buffers_equal_the_two_modules(norm, state):
    layer, conv = pair(norm, momentum=None if state == "cumulative" else 0.1)
    if state == "frozen":
        freeze_norms(layer)
    if state == "no statistics":
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    layer.train(state != "evaluation")
    twin = copy.deepcopy(layer)
    for seed in range(2):
        found = outcome(norm_conv, layer, conv, parts(seed))
        assert recomputes(found[0])
        assert worst_error(found, outcome(unfused, twin, conv, parts(seed))) < 1e-10


@pytest.mark.parametrize("inplace", [True, False])
def test_single_input_is_returned_unchanged(inplace):
    layer, conv = pair()
    layer.inplace = inplace
    x = torch.cat(parts(), 1)
    before = x.clone()
    norm_conv(layer, conv, x).sum().backward()
    assert torch.equal(x, before)


def test_training_batch_between_evaluation_and_its_backward_is_allowed():
    layer, conv = pair()
    inputs = parts()
    truth = outcome(unfused, copy.deepcopy(layer).eval(), conv, inputs)[1:-3]
    out = norm_conv(layer.eval(), conv, *inputs)
    norm_conv(layer.train(), conv, *parts(1))
    leaves = [*layer.parameters(), *conv.parameters(), *inputs]
    assert worst_error(torch.autograd.grad(out.square().sum(), leaves), truth) < 1e-10


class OwnNorm(InPlaceABN):
    def forward(self, x):
        return super().forward(x) * 2


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("norm", "conv"),
    [
        (ABN(5), nn.Conv2d(5, 4, 3)),
        (nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)),
        (OwnNorm(5), nn.Conv2d(5, 4, 3)),
        (InPlaceABN(5), OwnConv(5, 4, 3)),
        (InPlaceABN(5), nn.Conv2d(5, 4, 3, padding="same")),
        (InPlaceABN(5), nn.Conv2d(5, 4, 3, padding=1, padding_mode="reflect")),
        (InPlaceABN(5), nn.utils.parametrizations.weight_norm(nn.Conv2d(5, 4, 3))),
        (InPlaceABN(5), nn.ConvTranspose2d(5, 4, 3)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_unsupported_modules_run_sequentially(norm, conv):
    norm, conv = norm.double(), conv.double()
    found = outcome(norm_conv, norm, conv, parts())
    assert not recomputes(found[0])
    norm.reset_running_stats()
    assert worst_error(found[:-3], outcome(unfused, norm, conv, parts())[:-3]) < 1e-10


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre", "everywhere"])
def test_hooks_see_map(kind):
    for index in range(2):
        modules, seen = pair(), []
        modules[0].inplace = False  # a module with backward hooks gets a view, which may not be overwritten

        def hook(module, *args, seen=seen):
            seen.append(module)

        if kind == "everywhere":
            handle = nn.modules.module.register_module_forward_hook(hook)
        else:
            handle = getattr(modules[index], f"register_{kind}_hook")(hook)
        norm_conv(*modules, *parts()).sum().backward()
        handle.remove()
        assert modules[index] in seen
        assert recomputes(norm_conv(*modules, *parts()))


def test_nothing_is_recomputed_without_gradients():
    layer, conv = pair()
    with torch.no_grad():
        x = torch.cat(parts(), 1)
        before = x.clone()
        assert norm_conv(layer, conv, x).grad_fn is None
    assert not torch.equal(x, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised by torch while it traces
def test_compiled_norm_conv_equals_eager():
    norm, conv = pair()
    twin = copy.deepcopy(norm)
    torch._dynamo.reset()
    compiled = torch.compile(norm_conv, fullgraph=True, backend="aot_eager")
    found = outcome(compiled, norm, conv, parts())
    assert worst_error(found, outcome(norm_conv, twin, conv, parts())) < 1e-10


def test_torch_func_differentiates_norm_conv():
    norm, conv = pair()
    inputs = parts()
    names = dict(norm.named_parameters())

    def loss(parameters):
        running = {"running_mean": norm.running_mean.clone(), "running_var": norm.running_var.clone()}
        layer = copy.copy(norm)
        layer._parameters, layer._buffers = parameters, running | {"num_batches_tracked": torch.tensor(0)}
        return norm_conv(layer, conv, *inputs).square().sum()

    found = torch.func.grad(loss)(names)
    truth = outcome(unfused, copy.deepcopy(norm), conv, inputs)[1:3]
    assert worst_error(found.values(), truth) < 1e-10


def _sync_step(sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], Counter]:
    torch.manual_seed(0)
    layer, conv = pair(InPlaceABNSync)
    whole = torch.randn(sum(sizes), 5, 4, 3, dtype=torch.float64) * 3 + 100
    start = sum(sizes[: dist.get_rank()])
    x = whole[start : start + sizes[dist.get_rank()]].requires_grad_()
    calls: Counter = Counter()
    originals = {name: getattr(dist, name) for name in ("all_reduce", ALL_GATHER)}
    for name, original in originals.items():

        def counted(*args, name=name, original=original, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    out = norm_conv(layer, conv, x[:, :2], x[:, 2:])
    out.square().sum().backward()
    for name, original in originals.items():
        setattr(dist, name, original)
    grads = [p.grad for p in (*layer.parameters(), *conv.parameters())]
    return [out.detach(), x.grad, *grads, layer.running_mean, layer.running_var], calls


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(3, 2), (4, 0)])
def test_uneven_processes_equal_one_process(sizes):
    results = run_distributed(_sync_step, 2, sizes)
    torch.manual_seed(0)
    layer, conv = pair()
    x = (torch.randn(sum(sizes), 5, 4, 3, dtype=torch.float64) * 3 + 100).requires_grad_()
    truth = F.conv2d(activated_batch_norm(x, layer.weight, layer.bias), conv.weight, conv.bias, padding=1)
    truth.square().sum().backward()
    unfused(layer, conv, x.detach())  # updates the running statistics
    out, dx = (torch.cat([result[index] for result, _ in results]) for index in range(2))
    assert relative_error(out, truth) < 1e-9
    assert relative_error(dx, x.grad) < 1e-9
    for index, parameter in enumerate((*layer.parameters(), *conv.parameters()), start=2):
        assert relative_error(sum(result[index] for result, _ in results), parameter.grad) < 1e-9
    for result, calls in results:
        assert worst_error(result[-2:], [layer.running_mean, layer.running_var]) < 1e-10
        assert calls == Counter({"all_reduce": 1, ALL_GATHER: 1})
