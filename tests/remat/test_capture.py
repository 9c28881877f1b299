"""Captured lean training has the bits of plain training and holds what `zoo.lean` holds."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

from tests.remat.programs import (
    COMPILES,
    Convolutions,
    FrozenBody,
    are_equal,
    assert_same_step,
    gradients,
    held,
    images,
    network,
)
from zoo.errors import ConfigError
from zoo.remat import Rematerializer, inductor_options
from zoo.remat.graph import capture, cut
from zoo.remat.graph.capture import NotCaptured
from zoo.remat.graph.joint_graph import partition
from zoo.remat.lean import StepsAside, is_lean, lean

pytestmark = COMPILES


def num_graphs() -> int:
    """Return how many graphs were captured since they were forgotten."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "MIN_BYTES", 0)


class Normed(Convolutions):
    """Has norms, one of them frozen, and a buffer beside the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.group, self.instance = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.register_buffer("offset", torch.rand(1, 8, 12, 12))
        self.frozen.eval()


class WithDropout(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.second(F.dropout(F.gelu(self.first(x)), 0.3)))
        return self.second(F.dropout2d(y.relu(), 0.2))


class WithWrittenBuffer(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = F.relu(y + self.offset)
        self.offset.add_(1)
        return self.second(z) + y.pow(2) + self.offset


class WithWrites(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :4].mul_(2)
        y = y.relu_()
        z = y.flatten(1)
        return self.second((z * z.sigmoid()).view_as(y)) + y.tanh()


class WithNorms(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.instance(self.group(F.silu(self.frozen(self.first(x))))))


class WithSharedNorm(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)) + self.first(x))
        z = self.norm(self.second(F.max_pool2d(y, 3, 1, 1)))
        return F.relu(F.relu(z) + z)


class WithBranch(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        if y.sum() > 0:
            y = y * 2
        return self.second(F.silu(y))


class WithTiedWeights(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(4):
            y = y + F.gelu(self.second(y))
        return y + F.conv2d(x.repeat(1, 3, 1, 1)[:, :8], self.second.weight, padding=1)


class WithProduct(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.product(self.first(x)))
        return self.second(y) * F.hardswish(self.product(y))


class WithInterpolation(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(F.dropout(self.first(x), 0.1), scale_factor=2.0, mode="bilinear")
        z = F.interpolate(F.gelu(y), size=(10, 9), mode="bicubic", align_corners=True)
        return self.second(F.interpolate(z, scale_factor=1.5, mode="nearest"))


class WithChannelsLast(Normed):
    """Operations for which torch predicts other strides than they return."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.group(self.first(x.contiguous(memory_format=torch.channels_last)))
        return self.second(F.hardswish(F.dropout(y, 0.3))).flatten(1)


class WithUnreadRandomNumbers(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.3).relu()
        F.dropout(self.second(y).sigmoid(), 0.5)
        torch.randn_like(y)
        torch.rand(3)
        y.clone().bernoulli_(0.4)
        return self.second(F.dropout(F.silu(y), 0.3))


class WithWriteIntoInput(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5)
        return self.second(F.silu(self.first(x * x.sigmoid())))


class WithBreakBeforeWrite(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(F.relu(y, inplace=True).sigmoid())


class WithInferenceTensor(Convolutions):
    """Reads what a frozen encoder has computed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.offset = torch.rand(8, 12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)) + self.offset)


class WithReluOfInput(Convolutions):
    activation: nn.Module = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(self.activation(x))))


class WithHardswishOfInput(WithReluOfInput):
    activation = nn.Hardswish(inplace=True)


class WithLeakyReluOfInput(WithReluOfInput):
    activation = nn.LeakyReLU(0.1, inplace=True)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "residual": network,
    **{cls.__name__: cls for cls in [*Convolutions.__subclasses__(), *Normed.__subclasses__()] if cls is not Normed},
    **{cls.__name__: cls for cls in WithReluOfInput.__subclasses__()},
}

#: Programs that the trace computes differently from eager training under autocast, unless it is corrected.
AUTOCAST_DIFFERS = ("WithDropout", "WithSharedNorm", "WithTiedWeights")


def run(module: nn.Module, call: Any, autocast: bool = False, sizes: tuple[int, ...] = (4, 4, 4)) -> list[Tensor]:
    """Return outputs and gradients of training steps with momentum, then parameters, buffers and the random state."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    results: list[Tensor] = []
    for index, size in enumerate(sizes):
        x = torch.randn(size, 3, 12, 12, generator=torch.Generator().manual_seed(index)).requires_grad_()
        if index != 1:  # whose gradients are added to those of the first step
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = call(x * 1)
        output.float().square().mean().backward()
        results += [output.detach().clone(), x.grad, *(each.clone() for each in gradients(module))]
        optimizer.step()
    return [*results, *module.parameters(), *module.buffers(), torch.random.get_rng_state()]


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    ("name", "autocast", "is_dynamic"),
    [
        *((name, False, False) for name in PROGRAMS),
        *(
            pytest.param(name, True, False, marks=[pytest.mark.exhaustive] * (name not in AUTOCAST_DIFFERS))
            for name in PROGRAMS
        ),
        *((name, False, True) for name in ("WithDropout", "residual")),  # batches of all sizes share a graph
    ],
)
def test_steps_have_the_bits_of_plain_training(name: str, autocast: bool, is_dynamic: bool) -> None:
    plain, captured = PROGRAMS[name](), PROGRAMS[name]()
    sizes = (2, 3, 5) if is_dynamic else (4, 4, 4)
    expected = run(plain, plain, autocast, sizes)
    with warnings.catch_warnings():
        if name in ("WithBranch", "WithBreakBeforeWrite"):
            warnings.filterwarnings("ignore", message=r".*breaks the graph.*test_capture\.py", category=NotCaptured)
        function = torch.compile(captured, backend=capture.backend, dynamic=is_dynamic or None)
        found = run(captured, function, autocast, sizes)
    assert are_equal(found, expected)


def test_a_resnet_holds_what_it_holds_in_eager_lean_training() -> None:
    models = [torchvision.models.resnet18(weights=None) for _ in range(3)]
    x = torch.randn(2, 3, 96, 96)
    plain, eager, captured = models[0], lean(models[1]), lean(models[2], capture=True)
    for _ in range(2):
        assert held(captured, x) == pytest.approx(held(eager, x), rel=0.015)
        assert held(captured, x) < 0.5 * held(plain, x)
        for each in models:
            each.eval()


class WithMasks(nn.Module):
    """A network that saves dropout masks and the signs of a frozen ReLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
        self.frozen = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.layers(x))


def test_a_graph_of_dynamic_shape_holds_what_it_holds_in_eager_lean_training() -> None:
    plain, eager, captured = WithMasks(), lean(WithMasks()), lean(WithMasks(), capture=True)
    for size in (512, 1024, 1536):  # the second is captured with a symbolic size
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(size))
        assert held(captured, x) < 1.015 * held(eager, x)
        assert_same_step(captured, plain, x)


@pytest.mark.parametrize("budget", [None, 0.3, "1000000 FLOP/B"])
def test_backward_draws_no_random_numbers(budget: float | str | None) -> None:
    model, x = lean(WithMasks(), budget, capture=True), torch.randn(512, 64)
    for _ in range(2):
        loss = model(x).sum()
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)


def test_shapes_are_static_though_another_network_was_captured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (8, 16):
        lean(nn.Linear(4, 4), capture=True)(torch.ones(size, 4)).sum().backward()
    shapes = []

    def see(graph: fx.GraphModule, *args: Any, **options: Any) -> Any:
        shapes.extend(node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder"))
        return partition(graph, *args, **options)

    monkeypatch.setattr(capture, "partition", see)
    lean(nn.Linear(4, 4), capture=True)(torch.ones(24, 4)).sum().backward()
    assert torch.Size((24, 4)) in shapes


@pytest.mark.parametrize("has_frozen_norms", [True, False])
@pytest.mark.usefixtures("everything_is_large")
def test_frozen_layers_have_the_bits_and_hold_nothing(has_frozen_norms: bool) -> None:
    plain, model = FrozenBody(has_frozen_norms), lean(FrozenBody(has_frozen_norms), capture=True)
    x = images(32)
    x[0, 0, 3] = torch.nan
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for each in (plain, model):
            each(x).square().nan_to_num().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    found, expected = ([each.nan_to_num(7) for each in gradients(network)] for network in (model, plain))
    assert are_equal(found, expected)
    if has_frozen_norms:
        assert held(model, x) < 0.2 * held(plain, x)


def test_a_fraction_recomputes_some_of_the_products_of_equal_price() -> None:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
    model, x = nn.Sequential(*layers, nn.Linear(256, 1)), torch.randn(256, 256)
    plain, most = held(model, x), held(lean(copy.deepcopy(model), capture=True), x)
    limit = 0.85 * most
    assert 0.85 * limit < held(lean(copy.deepcopy(model), limit / plain, capture=True), x) <= limit


def test_copies_are_captured_and_evaluation_is_not() -> None:
    model = lean(network(), capture=True)
    x = torch.randn(2, 3, 12, 12)
    plain = network()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        graphs = num_graphs()
        with torch.no_grad():
            assert torch.equal(each.eval()(x), plain.eval()(x))
        assert num_graphs() == graphs
        assert is_lean(each)
        assert torch.equal(each.train()(x), copy.deepcopy(plain.train())(x))
        assert num_graphs() == graphs + 1
        torch._dynamo.reset()


def test_the_capture_is_undone_and_left_out_by_another_call() -> None:
    model = lean(lean(network(), capture=True))
    graphs = num_graphs()
    with warnings.catch_warnings(action="error", category=StepsAside):
        model(images())
    assert is_lean(model)
    lean(lean(model, capture=True), enabled=False)(images())
    assert type(model) is nn.Sequential
    assert num_graphs() == graphs


def test_a_graph_that_cannot_be_captured_runs_in_eager_lean_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no rule\nmore")

    monkeypatch.setattr(capture, "partition", fail)
    plain, model = (torchvision.models.resnet18(weights=None) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend=capture.backend)
    x = torch.randn(2, 3, 96, 96)
    with pytest.warns(NotCaptured, match=r"runs in eager zoo.lean \(NotImplementedError: no rule\)"):
        output = compiled(x)
    assert torch.equal(output, plain(x))
    assert held(compiled, x) < 0.5 * held(plain, x)


def test_the_backend_has_a_name() -> None:
    entries = entry_points(group="torch_dynamo_backends", name="zoo_lean")  # one for each installation of the package
    assert {entry.load() for entry in entries} == {capture.backend}


def test_inductor_saves_as_little() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 128, 3, padding=1), nn.BatchNorm2d(128), nn.SiLU(), nn.Conv2d(128, 128, 3, padding=1)]
        return nn.Sequential(*layers, nn.BatchNorm2d(128), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(128, 8, 1))

    plain, compiled, eager = model(), model(), lean(model())
    function = torch.compile(compiled, options=inductor_options())
    x = torch.randn(2, 3, 32, 32)
    for ours, truth in zip(run(compiled, function), run(plain, torch.compile(plain)), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-5)
    assert held(function, x) < 1.1 * held(eager, x)  # no copies of weights either


def test_a_step_for_which_torch_gives_up_is_lean() -> None:
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    plain = nn.Sequential(*copy.deepcopy(layers), *copy.deepcopy(layers))
    eager, captured = lean(copy.deepcopy(plain)), lean(copy.deepcopy(plain), capture=True)
    x = torch.randn(4, 16, 64, 64)
    assert held(eager, x) < 0.8 * held(plain, x)
    with torch.compiler.set_stance("force_eager"):
        assert held(captured, x) == held(eager, x)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        for size in (24, 28):
            captured(torch.randn(2, 16, size, size)).sum().backward()
        assert held(captured, x) == held(eager, x)


class Layers(nn.Module):
    """A network whose layers run in a loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.after(layer(x))
        return x

    def after(self, x: Tensor) -> Tensor:
        return x


class WithItem(Layers):
    def after(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum().item() > 0 else x


def maps(size: int = 4) -> Tensor:
    return torch.randn(size, 8, 40, 40, generator=torch.Generator().manual_seed(0))


def test_a_network_that_is_not_one_graph_runs_in_eager_lean_and_tells_once() -> None:
    plain, eager, model = WithItem(), lean(WithItem()), lean(WithItem(), capture=True)
    match = r"WithItem runs in eager zoo.lean, as it cannot be captured.*test_capture\.py"
    with pytest.warns(NotCaptured, match=match) as told:
        assert held(model, maps()) == held(eager, maps()) < 0.7 * held(plain, maps())
    assert len([each for each in told if each.category is NotCaptured]) == 1
    assert_same_step(model, plain, maps())


def test_with_the_backend_alone_a_graph_that_ends_early_warns_and_a_loop_that_torch_skips_is_plain() -> None:
    class Early(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            print(end="")
            return self.layers[1](y)

    class Skipped(Layers):
        def after(self, x: Tensor) -> Tensor:
            print(end="")
            return x

    with pytest.warns(NotCaptured, match=r"breaks the graph.*capture=True\) runs such a network in eager"):
        torch.compile(Early(), backend="zoo_lean")(maps())
    assert held(torch.compile(Skipped(), backend="zoo_lean"), maps()) == held(Skipped(), maps())


class Faulty(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 7:
            raise ValueError("a batch of seven")
        return super().forward(x)


@pytest.mark.parametrize("is_first", [False, True])
def test_after_an_exception_the_next_step_is_captured(is_first: bool) -> None:
    plain, model = Faulty(), lean(Faulty(), capture=True)
    if not is_first:
        model(maps()).sum().backward()
    for _ in range(2):
        for bad, error in ((maps(7), "a batch of seven"), (maps()[:, :5], "to have 8 channels, but got 5")):
            with pytest.raises((ValueError, RuntimeError), match=error):
                model(bad)
    graphs = num_graphs()
    assert_same_step(model, plain, maps())
    assert num_graphs() == graphs + is_first


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_torch_compiles_no_function_of_a_rematerializer() -> None:
    graphs = num_graphs()
    model = Layers()
    with Rematerializer():
        out = torch.compile(model, backend="eager")(maps())
    out.sum().backward()
    expected = Layers()
    expected(maps()).sum().backward()
    assert are_equal(gradients(model), gradients(expected))
    assert num_graphs() == graphs


def test_a_copy_computes_with_its_own_weights_though_the_module_is_parametrized() -> None:
    model = nn.utils.parametrizations.weight_norm(lean(nn.Linear(4, 4), capture=True))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    before = [each.clone() for each in gradients(model)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    other.zero_grad()
    found = other(x)
    assert torch.equal(found, 2 * model(x))
    found.sum().backward()
    assert are_equal(before, gradients(model))
    assert len(gradients(other)) == len(before)


def test_hooks_run_around_the_graph() -> None:
    calls = []
    graphs = num_graphs()
    models = Layers(), lean(Layers(), capture=True)
    for model in models:
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.register_forward_hook(lambda module, args, output: (calls.append(output.sum().item()), 2 * output)[1])
        model.register_full_backward_hook(lambda module, inputs, outputs: calls.append(outputs[0].sum().item()))
    plain, captured = (model(maps().requires_grad_()) for model in models)
    assert torch.equal(plain, captured)
    captured.sum().backward()
    plain.sum().backward()
    assert calls[0] == calls[1]
    assert calls[2] == calls[3]
    assert num_graphs() == graphs + 1
    assert models[1].forward.__func__ is Layers.forward


def test_a_norm_may_be_called_captured_and_uncaptured_before_backward() -> None:
    plain, model = Layers(), Layers()
    compiled = torch.compile(model, backend="zoo_lean")
    for first, second in ((compiled, model), (model, compiled)):
        for each in (plain, model):
            each.zero_grad()
        (plain(maps()) + plain(maps()).square()).sum().backward()
        (first(maps()) + second(maps()).square()).sum().backward()
        assert are_equal([*gradients(model), *model.buffers()], [*gradients(plain), *plain.buffers()])


class Critic(nn.Module):
    """Scores images; a penalty on its gradient is part of the loss."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 3)
        self.norm, self.p = nn.BatchNorm2d(8), p

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.first(x)), 0.2)
        return self.second(F.dropout(y * y.sigmoid(), self.p)).flatten(1).mean(1)


def penalized_steps(critic: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(critic.parameters())
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        real, fake, between = torch.randn(3, 4, 3, 9, 9, generator=generator).unbind()
        scores = critic(between.requires_grad_())
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        results += [slope.detach(), *(each.clone() for each in gradients(critic))]
        optimizer.step()
    return [*results, *critic.parameters(), *critic.buffers()]


def test_a_gradient_penalty_has_the_bits_of_plain_training() -> None:
    graphs = num_graphs()
    model = lean(Critic(), capture=True)
    assert are_equal(penalized_steps(model), penalized_steps(Critic()))
    assert num_graphs() > graphs


def second_backward(critic: nn.Module, x: Tensor) -> None:
    loss = critic(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(critic: nn.Module, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize("again", [second_backward, double_backward])
def test_a_graph_whose_backward_has_run_may_run_it_twice(again: Callable[[nn.Module, Tensor], None]) -> None:
    x, critics = torch.randn(4, 3, 9, 9, requires_grad=True), (Critic(), lean(Critic(), capture=True))
    for critic in critics:
        critic(x).sum().backward()  # compiles a backward that need not run again
        again(critic, x)
    assert are_equal(*map(gradients, critics))


def test_double_backward_of_a_graph_whose_scores_are_read_twice_differs_by_rounding() -> None:
    def of_both(critic: nn.Module) -> list[Tensor]:
        x = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
        scores = critic(x)
        (slope,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
        (slope.square().sum() + scores.sum()).backward()
        return gradients(critic)

    found, expected = of_both(lean(Critic(), capture=True)), of_both(Critic())
    assert not all(map(torch.equal, found, expected))
    largest = max(float(each.abs().max()) for each in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)


def test_double_backward_through_a_random_graph_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"it draws random numbers; .*capture=False"):
        penalized_steps(lean(Critic(0.1), capture=True))
    x = torch.randn(4, 3, 9, 9, requires_grad=True)
    slopes = []
    for model in (lean(Critic(0.1), capture=True), Critic(0.1)):
        torch.manual_seed(0)
        slopes += torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch.equal(*slopes)  # first derivatives remain possible


def test_double_backward_after_a_write_into_an_input_is_refused() -> None:
    model, x = lean(WithWrittenBuffer(), capture=True), torch.randn(2, 3, 12, 12, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match="one of its inputs was overwritten"):
        slope.sum().backward()


def test_what_the_backend_does_not_know_is_refused() -> None:
    for arguments, message in (
        ({"options": {"bugdet": 0.4}}, r"option 'bugdet' is unknown.*the only option is \"budget\""),
        ({"mode": "max-autotune"}, "mode='max-autotune' is one of Inductor's modes"),
        ({"options": {"budget": -1}}, "is invalid: pass a limit"),
        ({"options": {"budget": "8GB"}}, r'use zoo\.lean\(model, "8GB"\), with capture=True'),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(network(), backend="zoo_lean", **arguments)(torch.ones(2, 3, 12, 12))


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_captured_checkpoints_have_the_gradients_of_plain_training_but_update_statistics_once() -> None:
    plain, model = Checkpointed(), lean(Checkpointed(), capture=True)
    assert_same_step(model, plain, maps())
    assert [int(each.layers[0][1].num_batches_tracked) for each in (plain, model)] == [2, 1]


def test_export_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.remat.lean._has_warned", False)
    for is_captured in (False, True):
        model = lean(network(), capture=is_captured).eval()
        x = torch.ones(2, 3, 12, 12)
        with warnings.catch_warnings(action="error", category=StepsAside):
            exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))
