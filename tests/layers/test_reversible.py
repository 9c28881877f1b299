"""Reversible blocks of norms and convolutions against stored activations: gradients, statistics, bytes, processes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dist.spawn import run_distributed
from tests.formula import relative_error
from tests.refusals import refused
from tests.step import step
from zoo.layers import (
    ABN,
    InPlaceABN,
    InPlaceABNSync,
    ReversibleBlock,
    ReversibleSequential,
    init_weights,
)
from zoo.layers.conv import conv2d
from zoo.layers.norm import out_of_place
from zoo.memory.allocations import count_memory, measure_memory


def batch_norm(channels) -> nn.Sequential:
    """Return torch's own norm, with an activation."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


def branch(channels, norm, bottleneck=False, leading=True, dropout=0.0) -> nn.Sequential:
    """A pre-activation residual function; without ``leading`` it begins with its convolution."""
    inner = channels // 2 if bottleneck else channels
    layers = [out_of_place(norm(channels))] if leading else []
    layers += [conv2d(channels, inner, kernel_size=1 if bottleneck else 3), norm(inner)]
    if bottleneck:
        layers += [conv2d(inner, inner, kernel_size=3), norm(inner)]
    return nn.Sequential(*layers, nn.Dropout(dropout), conv2d(inner, channels, kernel_size=1 if bottleneck else 3))


def network(norm=ABN, number=3, **options) -> nn.Sequential:
    """A strided stem, reversible blocks and a head; the first block's f has no leading norm."""
    torch.manual_seed(0)
    blocks = [
        ReversibleBlock(branch(4, norm, leading=index > 0, **options), branch(4, norm, **options))
        for index in range(number)
    ]
    net = nn.Sequential(conv2d(3, 8, kernel_size=3, stride=2), ReversibleSequential(blocks), out_of_place(norm(8)))
    init_weights(net)
    return net


def stored(net):
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if isinstance(module, ReversibleSequential):
            module.store = True
    return twin


def images(number=4, side=12, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(number, 3, side, side, dtype=dtype)


@pytest.mark.parametrize("norm", [ABN, InPlaceABN, InPlaceABNSync, batch_norm])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_gradients_and_statistics_equal_stored_activations(norm, bottleneck):
    net = network(norm, bottleneck=bottleneck, dropout=0.3).double()
    twin = stored(net)
    for number in (4, 1, 3):
        ours, truth = step(net, images(number)), step(twin, images(number))
        assert max(map(relative_error, ours, truth)) < 1e-10
        assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_evaluation_uses_running_statistics_and_returns_gradients():
    net = network(InPlaceABN).double()
    step(net, images())
    net.eval()
    assert max(map(relative_error, step(net, images()), step(stored(net), images()))) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [1, 8, 18])
def test_inverse_returns_input_without_updating_statistics(dtype, number):
    blocks = network(InPlaceABN, number, bottleneck=True)[1].to(dtype)
    init_weights(blocks, "torch")
    x = torch.randn(8, 8, 16, 16, dtype=dtype)
    y = blocks(x)
    before = [buffer.clone() for buffer in blocks.buffers()]
    error = (blocks.inverse(y) - x).norm() / x.norm()
    assert error < {torch.float32: 1e-7, torch.float64: 1e-15}[dtype] * (number + 2)
    assert all(map(torch.equal, blocks.buffers(), before))


@pytest.mark.parametrize("store", [False, True])
def test_gradients_of_separate_halves_equal_gradient_of_the_whole(store):
    net, seen = network(InPlaceABN)[1].double(), []
    net.store = store
    net.meter = lambda index, _: seen.append(index)
    x = torch.randn(4, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(net(x).cos().sum(), x)
    (apart,) = torch.autograd.grad(net(x.chunk(2, 1)).cos().sum(), x)
    assert torch.equal(apart, whole)
    assert seen == ([] if store else [2, 1, 0] * 2)


LAYOUTS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(2, 3),
    "expanded": lambda x: x[:, :1].expand(-1, 8, -1, -1),
}


class _Laid(nn.Module):
    def __init__(self, layout, blocks):
        super().__init__()
        self.layout, self.blocks = layout, blocks

    def forward(self, x):
        return self.blocks(LAYOUTS[self.layout](x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_layout_are_right_and_recomputed_in_it(layout):
    net, seen = _Laid(layout, network(InPlaceABN)[1]).double(), {}
    twin = stored(net)
    for block in net.blocks:
        for each in (block.f, block.g):
            each.register_forward_pre_hook(lambda module, args: seen.setdefault(module, []).append(args[0].stride()))
    x = torch.randn(4, 8, 6, 12, dtype=torch.float64)
    assert max(map(relative_error, step(net, x), step(twin, x))) < 1e-10
    assert len(seen) == 6
    assert all(len(strides) == 2 and len(set(strides)) == 1 for strides in seen.values())


@pytest.mark.parametrize("shape", [(2, 7, 4, 4), (8,)])
def test_odd_channels_raise(shape):
    for call in (network()[1], network()[1].inverse):
        refused(ValueError, partial(call, torch.randn(shape)), "even C")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("branch", "names"),
    [
        (lambda: nn.Sequential(nn.ReLU(inplace=True)), ["(Sequential)", "overwrote"]),
        (lambda: nn.Sequential(InPlaceABN(4)), ["inplace = False"]),
        (lambda: nn.AdaptiveAvgPool2d(1), ["(2, 4, 4, 4)", "(2, 4, 1, 1)"]),
    ],
)
def test_branch_overwriting_input_or_changing_shape_raises(branch, names, grad):
    block = ReversibleBlock(nn.Identity(), branch())
    with torch.set_grad_enabled(grad):
        refused(RuntimeError, lambda: ReversibleSequential([block])(torch.randn(2, 8, 4, 4)), *names)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "measure"), [(ABN, measure_memory), (InPlaceABN, count_memory)])
def test_held_bytes_do_not_grow_with_depth(norm, measure):
    def held(number, store=False):
        net = network(norm, number)
        net[1].store = store
        x = images(dtype=torch.float32)
        return measure(lambda: net(x).square().sum(), list(net.parameters())).held

    batch_statistics = 2 * 2 * 4 * 64  # nothing for the 5 additional blocks, in the allocator's pieces of 64 bytes
    assert abs(held(7) - held(2)) < batch_statistics
    assert held(7, store=True) - held(2, store=True) > 5 * 4 * 4 * 6 * 6 * 4  # blocks, maps of 4 x 4 x 6 x 6 floats


@pytest.mark.parametrize("measure", [measure_memory, count_memory])
@pytest.mark.parametrize("is_held", [False, True])
def test_output_and_gradient_are_freed_before_inversion(measure, is_held):
    chain = ReversibleSequential(ReversibleBlock(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)) for _ in range(3))
    x = torch.randn(8, 4, 64, 64, requires_grad=True)
    outputs = []

    def forward():
        outputs.clear()  # here, so that the log cannot take its free for a free of a block that the step allocated
        y = chain(x)
        if is_held:
            outputs.append(y)
        return nn.functional.leaky_relu(y).sum()

    peak = measure(forward, [*chain.parameters(), x]).peak / (x.numel() * 4)
    # The map, its gradient, and either copies of their halves or the gradients in a branch.
    assert peak == pytest.approx(4 if is_held else 3, abs=0.1)


SETTINGS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


class _Headed(nn.Module):
    """Blocks, possibly shared, after a frozen stem, so that their input has no gradient."""

    def __init__(self, net, repeats):
        super().__init__()
        self.stem, self.blocks, self.head = net[0].requires_grad_(False), net[1], net[2]
        self.repeats = repeats

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.repeats):
            x = self.blocks(x)
        return self.head(x)


def _distributed_steps(norm, repeats) -> list[list[torch.Tensor]]:
    """Return gradients and buffers after two steps: stored with the default settings, then reversible with each."""
    results = []
    for settings in [{"store": True}, *SETTINGS]:
        net = network(norm).double()
        net[1].store = "store" in settings
        settings = {key: value for key, value in settings.items() if key != "store"}
        module = DistributedDataParallel(_Headed(net, repeats), **settings)
        for number in (2, 3):
            module.zero_grad()
            y = module(images(number + torch.distributed.get_rank()))
            (y.square() + y.sin()).sum().backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        results.append([*grads, *net.buffers()])
    return results


@pytest.mark.dist
@pytest.mark.parametrize("repeats", [1, 3])
def test_distributed_chain_equals_stored_activations(repeats):
    for truth, *ours in run_distributed(_distributed_steps, 2, InPlaceABNSync, repeats):
        assert len(truth) > 20
        for result in ours:
            assert len(result) == len(truth)
            assert max(map(relative_error, result, truth)) < 1e-10


def test_norms_changed_before_backward_raise():
    chain = ReversibleSequential(ReversibleBlock(nn.BatchNorm2d(2), nn.BatchNorm2d(2)) for _ in range(2))
    x = torch.randn(3, 4, 5, 5)
    y = chain(x)
    chain.eval()
    refused(RuntimeError, lambda: y.sum().backward(), "training", "evaluation")
    y = chain(x)
    chain.train()(x)  # updates the statistics that the first pass has used
    chain.eval()
    refused(RuntimeError, lambda: y.sum().backward(), "modified by an inplace operation")


class Reads(nn.Module):
    """A branch that adds another tensor to its output."""

    def __init__(self, other):
        super().__init__()
        self.conv, self.other = nn.Conv2d(4, 4, 1), other

    def forward(self, x):
        return self.conv(x) + self.other()


@pytest.mark.parametrize("grid_bits", [None, 14])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", ["encoder", "leaf", "weight of another module", "detached", "constant"])
def test_branch_reading_another_gradient_tensor_raises(kind, blocks, grid_bits):
    encoder, memory = nn.Conv2d(4, 4, 1), torch.randn(2, 4, 5, 5, requires_grad=True)
    features = encoder(torch.randn(2, 4, 5, 5))
    others = {
        "encoder": lambda: features,
        "leaf": lambda: memory * 2,
        "weight of another module": lambda: encoder.weight.sum(),
        "detached": lambda: features.detach(),
        "constant": lambda: torch.ones(4, 1, 1),
    }
    chain = ReversibleSequential(
        [ReversibleBlock(Reads(others[kind]), nn.Conv2d(4, 4, 1)) for _ in range(blocks)], grid_bits=grid_bits
    )
    loss = chain(torch.randn(2, 8, 5, 5, requires_grad=True)).square().mean()
    if kind in ("detached", "constant"):
        loss.backward()
        return
    refused(RuntimeError, lambda: loss.backward(), "branch Reads", "gradient")
    chain.store = True
    chain(torch.randn(2, 8, 5, 5)).square().mean().backward()
    assert memory.grad is not None if kind == "leaf" else encoder.weight.grad is not None
