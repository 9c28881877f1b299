"""The chain's operator: Algorithm 1 against autograd, held tensors, calls, random numbers and errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.formula import relative_error
from tests.refusals import refused
from zoo.layers.reversible import ReversibleBlock
from zoo.ops.chain import run_chain


class Branch(nn.Module):
    """A smooth nonlinear branch that counts its calls and may draw random numbers."""

    def __init__(self, width: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = dropout
        self.runs: list[None] = []  # a recomputation restores attributes, but not the content of lists

    @property
    def calls(self):
        return len(self.runs)

    def forward(self, x):
        self.runs.append(None)
        return nn.functional.dropout(torch.tanh(self.linear(x)), self.dropout)


def blocks(number=3, dropout=0.0, dtype=torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)
    chain = nn.ModuleList(ReversibleBlock(Branch(dropout=dropout), Branch(dropout=dropout)) for _ in range(number))
    return chain.to(dtype)


def pair(rows=5, dtype=torch.float64, grads=(True, True)):
    torch.manual_seed(1)
    return [torch.randn(rows, 3, dtype=dtype).requires_grad_(needs) for needs in grads]


def loss(outputs):
    """Gradients that differ between the outputs, none of them zero."""
    return sum((index + 1) * y.square().sum() + y.sin().sum() for index, y in enumerate(outputs))


def gradients(links, xs, store, seed=2):
    """Return outputs, gradients and the random number after a step."""
    parameters = list(dict.fromkeys(p for link in links for p in link.parameters()))
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    outputs = run_chain(links, *leaves, store=store)
    loss(outputs).backward()
    grads = [tensor.grad for tensor in [*leaves, *parameters] if tensor.grad is not None]
    return [*[y.detach() for y in outputs], *grads, torch.rand(3, dtype=torch.float64)]


def assert_equal_steps(links, xs, tolerance=1e-12):
    ours, truth = gradients(links, xs, store=False), gradients(links, xs, store=True)
    assert len(ours) == len(truth)
    assert max(map(relative_error, ours, truth)) < tolerance


class _Offset(nn.Module):
    """A branch whose parameter has the gradient of the branch's output."""

    def __init__(self, shape):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(shape, dtype=torch.float64))

    def forward(self, x):
        return x.sin() + self.offset


def frozen(*names):
    chain = blocks()
    for block in chain:
        for name in names:
            getattr(block, name).requires_grad_(False)
    return chain


def sharing():
    shared = blocks(1)[0].f
    return [ReversibleBlock(shared, shared), ReversibleBlock(Branch().double(), shared)]


CHAINS = {
    "blocks": blocks,
    "one block": lambda: blocks(1),
    "dropout": lambda: blocks(dropout=0.5),
    "frozen f": lambda: frozen("f"),
    "frozen g": lambda: frozen("g"),
    "shared branch": sharing,
    "gradients passed through": lambda: [ReversibleBlock(_Offset((5, 3)), _Offset((5, 3))) for _ in range(3)],
}


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_equal_autograd_and_outputs_are_bit_identical(name, grads):
    chain = CHAINS[name]()
    ours, truth = (gradients(chain, pair(grads=grads), store=store) for store in (False, True))
    assert len(ours) == len(truth)
    assert max(map(relative_error, ours, truth)) < 1e-12
    assert all(map(torch.equal, ours[:2], truth[:2]))


def test_branches_run_twice_per_step_and_once_without_gradients():
    chain = blocks()
    branches = [branch for block in chain for branch in (block.f, block.g)]
    gradients(chain, pair(), store=False)
    assert [branch.calls for branch in branches] == [2] * 6
    with torch.no_grad():
        run_chain(chain, *pair())
    with torch.inference_mode():
        run_chain(chain, *pair())
    assert [branch.calls for branch in branches] == [4] * 6


def test_random_states_are_saved_only_if_used():
    chain = blocks()
    chain[1].g.dropout = 0.5
    outputs = run_chain(chain, *pair())  # outputs keep the graph alive
    last = outputs[0].grad_fn
    before = last.next_functions[0][0]
    kept = [state is not None for node in (before, last) for state in node.random_states]
    assert kept == [False, False, False, True, False, False]


def test_branches_before_the_first_trained_are_not_recomputed():
    chain = blocks()
    chain[0].requires_grad_(False)
    chain[1].f.requires_grad_(False)
    assert_equal_steps(chain, pair(grads=(False, False)))
    calls = [branch.calls for block in chain for branch in (block.f, block.g)]
    assert calls == [2, 2, 2, 3, 3, 3]  # one step of both kinds: ours trains one more time


def test_unused_parameter_has_no_gradient():
    chain = blocks()
    chain[1].f.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert_equal_steps(chain, pair())
    assert chain[1].f.spare.grad is None


def test_same_tensor_as_both_inputs_has_right_gradients():
    chain = blocks()
    (x, _), results = pair(), []
    for store in (False, True):
        leaf = x.detach().clone().requires_grad_()
        y1, y2 = run_chain(chain, leaf, leaf, store=store)
        (y1 * y2 + y1).sum().backward()  # the same memory may reach both outputs as gradient
        results.append(leaf.grad)
    assert relative_error(*results) < 1e-12


@pytest.mark.parametrize("which", [0, 1])
def test_loss_of_one_output_alone_has_the_right_gradients(which):
    chain, results = blocks(), []
    for store in (False, True):
        xs = pair()
        run_chain(chain, *xs, store=store)[which].sum().backward()
        results.append([x.grad for x in xs])
    assert max(map(relative_error, *results)) < 1e-12


def test_two_backward_passes_accumulate_and_leave_outputs_unchanged():
    chain, xs = blocks(), pair()
    outputs = run_chain(chain, *xs)
    before = [y.detach().clone() for y in outputs]
    loss(outputs).backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in [*xs, *chain.parameters()]]
    loss(outputs).backward()
    for tensor, grad in zip([*xs, *chain.parameters()], once, strict=True):
        assert torch.equal(tensor.grad, 2 * grad)
    assert all(map(torch.equal, outputs, before))


def test_output_changed_before_backward_raises():
    y1, y2 = run_chain(blocks(), *pair())
    total = (y1 * 2).sum() + (y2 * 2).sum()
    with torch.no_grad():
        y1.add_(1)
    refused(RuntimeError, lambda: total.backward(), "modified by an inplace operation")


def test_hooks_on_parameters_run_once():
    chain, results = blocks(), []
    calls = []
    chain[1].g.linear.weight.register_hook(lambda grad: calls.append(1) or 3 * grad)
    for store in (False, True):
        results.append(gradients(chain, pair(), store))
    assert len(calls) == 2
    assert max(map(relative_error, *results)) < 1e-12


def test_parameters_changed_before_backward_raise():
    block, (x1, x2) = blocks(1)[0], pair()
    other = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    net = _Net(block)
    total = loss(functional_call(net, {f"block.{name}": p for name, p in other.items()}, (x1, x2)))
    refused(RuntimeError, lambda: total.backward(), "parameters of a chain")
    loss(net(x1, x2)).backward()  # its own are there


def test_data_parallel_replicas_raise():
    copies = [block._replicate_for_data_parallel() for block in blocks()]
    refused(RuntimeError, lambda: run_chain(copies, *pair()), "DistributedDataParallel")


class _Swap(nn.Module):
    """A link that swaps its inputs."""

    def forward(self, x1, x2):
        return x2, x1

    def reverse(self, ys, grads, may_overwrite):
        return ys[::-1], grads[::-1], {}


def test_metered_chain_leaves_no_reference_cycle():
    freed = []
    links = [*blocks(), _Swap()]
    gc.collect()
    gc.disable()
    try:
        outputs = run_chain(links, *pair(), meter=lambda index, error: None)
        weakref.finalize(outputs[0].grad_fn, freed.append, True)
        del outputs
        assert freed
    finally:
        gc.enable()


class _Net(nn.Module):
    """A chain of one block in a module."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x1, x2):
        return run_chain([self.block], x1, x2)


def test_transforms_of_torch_func_are_right():
    chain, (x1, x2) = blocks(), pair()

    def total(x1):
        return loss(run_chain(chain, x1, x2))

    expected = torch.autograd.grad(loss(run_chain(chain, x1, x2, store=True)), x1)[0]
    assert relative_error(torch.func.grad(total)(x1), expected) < 1e-12
    rows = torch.func.vmap(lambda a, b: run_chain(chain, a, b)[0])(x1, x2)
    assert relative_error(rows, run_chain(chain, x1, x2)[0]) < 1e-12


class Spy(nn.Module):
    """A branch that notes the state of autocast and the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen = []

    def forward(self, x):
        y = self.linear(x)
        self.seen.append((torch.is_autocast_enabled("cpu"), x.dtype, y.dtype))
        return y


@pytest.mark.parametrize("inside", [False, True])
def test_recomputation_uses_autocast_of_forward(inside):
    torch.manual_seed(0)
    chain = [ReversibleBlock(Spy(), Spy()) for _ in range(2)]
    xs = pair(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run_chain(chain, *xs)
        if inside:
            loss(outputs).backward()
    if not inside:
        loss(outputs).backward()
    assert [y.dtype for y in outputs] == [torch.float32] * 2
    assert [x.grad.dtype for x in xs] == [torch.bfloat16] * 2
    for spy in (chain[0].f, chain[0].g, chain[1].f, chain[1].g):
        assert spy.seen == [(True, torch.float32, torch.bfloat16)] * 2
        assert spy.linear.weight.grad.abs().sum() > 0


def test_backward_ignores_outer_autocast():
    chain = [ReversibleBlock(Spy(), Spy())]
    outputs = run_chain(chain, *pair(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        loss(outputs).backward()
    assert chain[0].f.seen == [(False, torch.float32, torch.float32)] * 2


def test_meter_gets_errors_of_link_inputs_in_reverse():
    seen = []
    outputs = run_chain(blocks(dtype=torch.float32), *pair(dtype=torch.float32), meter=lambda *of: seen.append(of))
    loss(outputs).backward()
    assert [index for index, _ in seen] == [2, 1, 0]
    assert all(0 <= error < 1e-6 for _, error in seen)
    assert any(error > 0 for _, error in seen)


class Scale(nn.Module):
    """Multiplies one tensor by the square of a parameter; undoes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.seen = []

    def forward(self, x):
        return x * self.weight.square()

    def reverse(self, ys, grads, may_overwrite):
        self.seen.append(may_overwrite)
        y, dy, factor = ys[0], grads[0], self.weight.square()
        x = y.div_(factor) if may_overwrite else y / factor
        dweight = (dy * x).sum() * 2 * self.weight
        return (x,), (dy.mul_(factor) if may_overwrite else dy * factor,), {self.weight: dweight}


def test_chain_overwrites_only_its_own_tensors():
    links, (x, _) = nn.ModuleList(Scale() for _ in range(3)), pair()
    assert_equal_steps(links, [x])
    assert [link.seen for link in links] == [[True], [True], [False]]
    (y,) = run_chain(links, x)
    before = y.detach().clone()
    loss([y]).backward(retain_graph=True)
    once = x.grad.clone()
    loss([y]).backward()
    assert torch.equal(x.grad, 2 * once)
    assert torch.equal(y, before)


def test_branch_may_be_a_chain():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.links = nn.ModuleList([Scale(), Scale()])
            self.store = False

        def forward(self, x):
            return run_chain(self.links, torch.tanh(x), store=self.store)[0]

    chain = [ReversibleBlock(Inner(), Inner()) for _ in range(2)]
    assert_equal_steps(chain, pair())
    ours = gradients(chain, pair(), store=False)
    for block in chain:
        block.f.store = block.g.store = True
    assert max(map(relative_error, ours, gradients(chain, pair(), store=True))) < 1e-12
