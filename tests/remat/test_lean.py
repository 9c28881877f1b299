"""`lean` changes what a module holds in training, and nothing else."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.remat.programs import are_equal, images, network
from tests.step import step
from zoo.errors import ConfigError
from zoo.remat import Rematerializer
from zoo.remat.budget import Budget
from zoo.remat.lean import StepsAside, is_lean, lean

SIZE_PX = 64  # maps of 64 x 64 px and 8 channels are larger than what is kept for being small


def test_a_lean_network_trains_with_the_same_bits_and_the_same_state() -> None:
    plain = network()
    model = lean(copy.deepcopy(plain))
    assert is_lean(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for _ in range(2):
        assert are_equal(step(plain, images()), step(model, images()))


def test_it_is_undone_and_replaced() -> None:
    plain = network()
    model = lean(lean(network()), "40 FLOP/B")
    assert isinstance(model, type(plain))
    assert repr(model) == repr(plain)
    assert lean(model, enabled=False) is model
    assert not is_lean(model)
    assert type(model) is type(plain)
    assert vars(model).keys() == vars(plain).keys()


def test_a_lean_network_is_copied_and_pickled() -> None:
    model = lean(network())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert is_lean(other)
        assert are_equal(step(network(), images()), step(other, images()))


def test_a_graph_module_is_copied_pickled_and_recompiled() -> None:
    for model in (lean(torch.fx.symbolic_trace(network())), lean(network())):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
            if isinstance(other, torch.fx.GraphModule):
                other.recompile()
            assert is_lean(other)
            plain, found = step(network(), images()), step(other, images())  # parameters may be in another order
            assert are_equal(plain[:2], found[:2])
            assert not is_lean(lean(other, enabled=False))


def test_a_lean_network_may_get_a_subclass_of_its_class() -> None:
    model = lean(network())
    assert type(copy.deepcopy(model)) is type(model)
    model.__class__ = type("Other", (type(model),), {})
    other = copy.deepcopy(model)
    assert is_lean(other)
    assert are_equal(step(network(), images()), step(other, images()))
    layer = lean(nn.Sequential(nn.Linear(3, 3)))
    nn.utils.parametrize.register_parametrization(layer[0], "weight", nn.Tanh())
    assert is_lean(copy.deepcopy(layer))


class Count:
    """Counts the recordings that begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        enter = Rematerializer.__enter__

        def count(recording: Rematerializer) -> Rematerializer:
            self.number += 1
            return enter(recording)

        monkeypatch.setattr(Rematerializer, "__enter__", count)


def test_parts_and_nested_modules_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = Count(monkeypatch)
    model = network()
    lean(model[1])
    lean(model[2])
    expected = step(network(), images())
    assert are_equal(expected, step(model, images()))
    assert recordings.number == 2
    lean(model)
    assert are_equal(expected[:2], step(lean(model), images())[:2])
    assert recordings.number == 3


def test_nothing_is_recorded_without_gradients_or_while_others_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = Count(monkeypatch)
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


def test_an_exception_in_forward_ends_the_recording() -> None:
    class Faulty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model = nn.Sequential(nn.ReLU(), lean(Faulty()))
    with pytest.raises(ValueError, match="no"):
        lean(model)(images().requires_grad_())
    good = lean(network())
    assert are_equal(step(network(), images()), step(good, images()))


def compiled(model: nn.Module, where: str, backend: Any) -> nn.Module:
    """Return a lean network that is compiled, or one of whose parts is."""
    if where == "around":
        return torch.compile(lean(model), backend=backend, fullgraph=True)
    if where == "inside":
        model[1] = torch.compile(model[1], backend=backend)
    else:
        model[1].compile(backend=backend)
    return lean(model)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # from the compiler
@pytest.mark.parametrize("where", ["around", "inside", "inside, by its method"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_steps_aside_for_a_compiler_and_tells_once(
    where: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.remat.lean._has_warned", False)
    torch._dynamo.reset()
    graphs = []
    compile_graph = torch._dynamo.lookup_backend(backend)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compile_graph(graph, inputs)

    recordings = Count(monkeypatch)
    model = compiled(network(), where, count)
    with pytest.warns(StepsAside, match="inductor_options"):
        found = step(model, images())
    torch._dynamo.reset()
    step(model, images())  # is compiled again; a second warning would be an error
    assert recordings.number == 0
    assert graphs
    for a, b in zip(step(network(), images()), found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("budget", [0.3, "1000 FLOP/B"])
def test_a_budget_repeats_the_cheapest_convolutions(budget: Any) -> None:
    model, free = lean(network(), budget), lean(network())
    expected = step(network(), images(SIZE_PX))
    for _ in range(2):
        found = step(model, images(SIZE_PX))
        assert are_equal(expected[:2], found[:2])
    step(free, images(SIZE_PX))
    limited, unlimited = (vars(each)["_zoo_lean"].budget for each in (model, free))
    assert limited.flops_per_byte > unlimited.flops_per_byte == 0


@pytest.mark.parametrize("budget", [0, -5, 1.5, 0.0, True, "much", "40", "8 GBit", "-1GB", [1]])
def test_what_is_no_budget_is_told(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"is invalid: pass a limit on the peak memory"):
        lean(network(), budget)


def test_budgets_are_parsed() -> None:
    assert Budget.parse("40 FLOP/B").flops_per_byte == 40
    assert not Budget.parse(None).is_observed
    assert Budget.parse(0.5).is_observed
    assert Budget.parse(10**9).peak_bytes == Budget.parse("1GB").peak_bytes == Budget.parse(" 1000 MB").peak_bytes
    assert Budget.parse("8GiB").peak_bytes == 2**33
