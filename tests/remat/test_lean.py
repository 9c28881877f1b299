"""`lean` changes only the tensors that a module saves in training."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

from tests.refusals import refused
from tests.remat.programs import are_equal, assert_same_step, gradients, held, images, network
from tests.step import step
from zoo.errors import ConfigError
from zoo.memory.held import HeldLog
from zoo.remat import Rematerializer
from zoo.remat import _limit as limit
from zoo.remat import _plan as plan
from zoo.remat._budget import Budget
from zoo.remat._lean import StepsAside, is_lean, lean, make_plain

SIZE_PX = 64  # maps of 64 x 64 px and 8 channels are too large to be kept as small tensors


def test_lean_training_is_disabled_and_replaced() -> None:
    plain = network()
    model = lean(lean(network()), 0.4)
    assert isinstance(model, type(plain))
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert lean(model, enabled=False) is model
    assert not is_lean(model)
    assert type(model) is type(plain)
    assert vars(model).keys() == vars(plain).keys()


@pytest.mark.parametrize("change", [lambda model: model, torch.fx.symbolic_trace], ids=["module", "graph module"])
def test_lean_network_is_copied_pickled_and_recompiled(change: Callable[[nn.Module], nn.Module]) -> None:
    model = lean(change(network()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), pickle.loads(pickle.dumps(model))
    for other in (*copies, torch.load(file, weights_only=False)):
        if isinstance(other, torch.fx.GraphModule):
            other.recompile()
        assert is_lean(other)
        plain, found = step(network(), images()), step(other, images())  # parameters may be in another order
        assert are_equal(plain[:2], found[:2])
        assert not is_lean(lean(other, enabled=False))


class Count:
    """Counts the recordings that begin."""

    number = 0


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Count:
    count, enter = Count(), Rematerializer.__enter__

    def counted(recording: Rematerializer) -> Rematerializer:
        count.number += 1
        return enter(recording)

    monkeypatch.setattr(Rematerializer, "__enter__", counted)
    return count


def test_lean_network_may_get_subclass_of_its_class() -> None:
    model = lean(network())
    assert type(copy.deepcopy(model)) is type(model)
    model.__class__ = type("Other", (type(model),), {})
    other = copy.deepcopy(model)
    assert is_lean(other)
    assert are_equal(step(network(), images()), step(other, images()))
    layer = lean(nn.Sequential(nn.Linear(3, 3)))
    nn.utils.parametrize.register_parametrization(layer[0], "weight", nn.Tanh())
    assert is_lean(copy.deepcopy(layer))


def test_parts_and_nested_modules_record_once(recordings: Count) -> None:
    model = network()
    lean(model[1])
    lean(model[2])
    expected = step(network(), images())
    assert are_equal(expected, step(model, images()))
    assert recordings.number == 2
    lean(model)
    assert are_equal(expected[:2], step(lean(model), images())[:2])
    assert recordings.number == 3


def test_nothing_is_recorded_without_gradients_or_under_transforms(recordings: Count) -> None:
    model = lean(network().eval())
    with torch.no_grad():
        model(images())
    weights = dict(model.named_parameters())
    torch.func.grad(lambda w: torch.func.functional_call(model, w, images()).sum())(weights)
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, by a warning of another kind in torch 2.11
        torch.jit.trace(model, images())
    assert recordings.number == 0
    torch.func.functional_call(model, weights, images()).sum().backward()
    assert recordings.number == 1


def compiled(where: str, backend: Any) -> Callable[[Tensor], Tensor]:
    """Return a lean network that is compiled, or one of whose parts or methods is."""
    model = network() if where != "a method" else Encoder()
    if where == "inside":
        model[1] = torch.compile(model[1], backend=backend)
    elif where == "inside, by its method":
        model[1].compile(backend=backend)
    model = lean(model)
    if where == "a method":
        return torch.compile(lambda x: model.encode_image(x), backend=backend, fullgraph=True)
    return torch.compile(model, backend=backend, fullgraph=True) if where == "around" else model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from the compiler
@pytest.mark.parametrize("where", ["around", "inside", "inside, by its method", "a method"])
def test_lean_training_yields_to_compiler_and_warns_once(
    where: str, recordings: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.remat._lean._has_warned", False)
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    function = compiled(where, count)
    with pytest.warns(StepsAside, match="inductor_options"):
        found = function(images())
    torch._dynamo.reset()
    function(images())  # is compiled again; a second warning would be an error
    assert recordings.number == 0
    assert graphs
    torch.testing.assert_close(found, network()(images()))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, and an activation that reads the sum of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(128, width).requires_grad_(False)
        self.down, self.up, self.back = nn.Linear(128, 8), nn.Linear(8, width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.silu(self.base(x) + 2 * self.up(self.down(x))))


def test_fraction_is_met_by_recomputing_sums_of_products() -> None:
    """The fraction bounds the bytes saved and recomputed. No more of them are recomputed than necessary."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Adapted(width) for width in (512, 512, 512, 512))), torch.randn(256, 128)
    budget = Budget.parse(0.35)
    for _ in range(2):  # the first pass is recorded
        log = HeldLog()
        with log.record(budget, parameters=model.parameters()):
            node = model(x).sum().grad_fn
    share = sum(each.lean for each in log.memory()) / sum(each.plain for each in log.memory())
    assert 0 < share <= 0.35
    del node
    planner = budget.limiter.planner(None)
    assert 0.25 < planner.within(0.35 * planner.plain_bytes).live / planner.plain_bytes <= 0.35


@pytest.mark.parametrize("budget", [0, -5, 1.5, 0.0, True, "much", "40", "40 FLOP/B", "8 GBit", "-1GB", [1]])
def test_invalid_budget_raises_config_error(budget: Any) -> None:
    refused(ConfigError, lambda: lean(network(), budget), f"budget {budget!r}")


def test_budgets_are_parsed() -> None:
    assert [Budget.parse(each).has_limit for each in (None, 1.0, 0.5, "1GB")] == [False] * 2 + [True] * 2
    assert Budget.parse(10**9).peak_bytes == Budget.parse("1GB").peak_bytes == Budget.parse(" 1000 MB").peak_bytes
    assert Budget.parse("8GiB").peak_bytes == 2**33
    budgets = {"8G": 8 * 10**9, "1 TB": 10**12, "2e3 MB": 2 * 10**9, "0.5 gb": 5 * 10**8}
    assert {text: Budget.parse(text).peak_bytes for text in budgets} == budgets
    assert Budget.parse("50%").share == Budget.parse(0.5).share == 0.5
    refused(ConfigError, lambda: Budget.parse(8), '"8GB"')


class Encoder(nn.Module):
    """A network with the methods that networks document beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.forward_features(x))

    def forward_features(self, x: torch.Tensor, layers: int = 4) -> torch.Tensor:
        return self.body[:layers](x)

    def get_intermediate_layers(self, x: torch.Tensor, n: int = 1) -> list[torch.Tensor]:
        return [self.forward_features(x, layers) for layers in range(4 - n, 4)]

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[4:](x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


METHODS = ("forward_features", "get_intermediate_layers", "encode_image", "decode")


@pytest.mark.parametrize("method", METHODS)
def test_feature_methods_run_lean(method: str, recordings: Count) -> None:
    model, plain = lean(Encoder()), Encoder()
    x = images(SIZE_PX) if method != "decode" else torch.randn(2, 8, SIZE_PX, SIZE_PX)
    for each in (plain, model):
        outputs = getattr(each, method)(x)
        sum(out.square().mean() for out in (outputs if isinstance(outputs, list) else [outputs])).backward()
    assert are_equal(gradients(plain), gradients(model))
    assert recordings.number == 1
    with torch.no_grad():
        getattr(model, method)(x)
    assert recordings.number == 1


def test_other_methods_run_plainly(recordings: Count) -> None:
    model = lean(Encoder())
    assert are_equal(step(Encoder(), images()), step(model, images()))
    assert recordings.number == 1
    model.generate(images())
    assert recordings.number == 1
    assert list(inspect.signature(model.forward_features).parameters) == ["x", "layers"]
    lean(model, enabled=False).forward_features(images())
    assert recordings.number == 1


class Scripted(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_features(x)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.part(x))


@pytest.mark.parametrize(
    "model",
    [lean(nn.Linear(3, 3)), lean(Scripted(nn.Linear(3, 3))), Scripted(lean(nn.Sequential(nn.Linear(3, 3))))],
    ids=["layer", "network", "part"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_scripting_lean_network_raises_until_network_is_plain(model: nn.Module) -> None:
    refused(ConfigError, lambda: torch.jit.script(model), "torch.jit.script", "enabled=False")
    x = torch.randn(2, 3)
    assert are_equal([torch.jit.script(make_plain(model))(x)], [model(x)])


def test_parts_of_lean_network_can_be_made_lean(recordings: Count) -> None:
    model = lean(torchvision.models.resnet18())
    parts: list[nn.Module] = [
        nn.Sequential(*model.children())[:5],
        IntermediateLayerGetter(model, {"layer1": "out"}),
        create_feature_extractor(model, ["layer1"]),
    ]
    for each in parts:
        each(images(SIZE_PX))
    assert recordings.number == 0
    for each in parts:
        lean(each)(images(SIZE_PX))
    assert recordings.number == 3


def test_class_of_lean_network_builds_plain_network(recordings: Count) -> None:
    twin = type(lean(Encoder()))()
    twin.load_state_dict(Encoder().state_dict())
    assert not is_lean(copy.copy(twin))
    for each in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), twin):
        assert not is_lean(each)
        assert are_equal(step(Encoder(), images()), step(each, images()))
    assert recordings.number == 0
    assert is_lean(lean(twin))


class OfLowRank(nn.Module):
    """Scales the output of a LoRA adapter by a parameter, which needs this output for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)) * self.scale


def test_low_rank_product_is_not_saved() -> None:
    x = torch.randn(512, 128, requires_grad=True)
    networks = OfLowRank(), lean(OfLowRank())
    plain, ours = (held(each, x) for each in networks)
    assert ours < plain - 0.9 * x.nbytes
    assert_same_step(*networks, x)


def test_call_without_large_tensors_runs_plainly(recordings: Count) -> None:
    model = lean(nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 2)))
    for rows, expected in ((4, 1), (4, 1), (512, 2), (512, 3), (512, 4), (4, 4), (8, 5)):
        model(torch.randn(rows, 8)).sum().backward()
        assert recordings.number == expected
    model.eval()
    model(torch.randn(4, 8))
    assert recordings.number == 6
    of_list = lean(_OfList())
    for rows, expected in ((4, 7), (4, 7), (5, 8)):
        of_list([torch.randn(rows, 8)]).sum().backward()
        assert recordings.number == expected


@pytest.mark.parametrize("name", ["products", "small tensors", "little to save", "frozen layers"])
def test_calls_that_recompute_nothing_run_plainly(
    name: str, recordings: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "NUM_PLAIN", 3)
    model = {
        "products": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
        "small tensors": lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 64)) for _ in range(3))
        ),
        "little to save": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))),
        "frozen layers": lambda: nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1).requires_grad_(False)),
    }[name]()
    x = torch.randn(1, 40, 64) if name == "frozen layers" else torch.randn(80, 64)
    lean(model)
    for expected in [1, 1, 1, 1, 2, 2, 2, 2, 3] if name != "frozen layers" else [1, 2, 3, 4, 5]:
        model(x).sum().backward()
        assert recordings.number == expected


@pytest.mark.parametrize(
    "inputs",
    [
        lambda number: (torch.randn(64 + number, 64), None),
        lambda number: (torch.randn(80, 64), {"sizes": [torch.zeros(number)]}),
        lambda number: (torch.randn(80, 64), f"batch {number}"),
    ],
    ids=["rows", "sizes in dict", "names"],
)
def test_calls_of_kinds_seen_once_are_not_planned(
    inputs: Callable[[int], tuple[Tensor, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_recent", deque())  # equal networks of other tests
    planned: list[int] = []
    saved_for = plan._MinimumCut.saved_for
    monkeypatch.setattr(plan._MinimumCut, "saved_for", lambda *args: [planned.append(1), saved_for(*args)][1])
    model = lean(_WithOther())
    for number in range(5):
        model(*inputs(number)).sum().backward()
    assert not planned
    for _ in range(3):
        model(*inputs(0)).sum().backward()
    assert len(planned) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda number: {"files": (f"{number}.jpg", f"{number + 1}.jpg")},
        lambda number: [f"{number}.jpg", torch.zeros(2)],
        lambda number: {"nested": [{"name": str(number)}]},
        lambda number: number,
        lambda number: number / 2,
    ],
    ids=["files in dict", "file in list", "nested", "number of step", "fraction"],
)
def test_varying_arguments_make_no_new_kind(other: Callable[[int], Any]) -> None:
    model, x = lean(_WithOther()), torch.randn(80, 64)
    for number in range(4):
        model(x, other(number)).sum().backward()
    assert len(vars(model)["_zoo_lean"].limiter._kinds) == 1


class _WithOther(nn.Module):
    """Gets another input, which it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Sigmoid(), nn.Linear(64, 64))

    def forward(self, x: Tensor, other: Any) -> Tensor:
        out: Tensor = self.body(x)
        return out


class _OfList(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: list[Tensor]) -> Tensor:
        return super().forward(x[0]).sigmoid()
