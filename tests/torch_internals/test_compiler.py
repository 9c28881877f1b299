"""torch's compiler has the behavior that the package relies on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.torch_internals import compiler

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch 2.11's compiler


def test_compiler_traces_neither_disabled_function_nor_its_callees():
    compiling = []

    def called() -> None:
        compiling.append(torch.compiler.is_compiling())

    @compiler.disable_compiler
    def disabled(x: Tensor) -> Tensor:
        called()
        return x + 1

    @partial(torch.compile, backend="eager")
    def function(x: Tensor) -> Tensor:
        return disabled(x * 2) * 3

    assert float(function(torch.ones(()))) == 9
    assert compiling == [False]


def test_compiled_part_of_module_is_found():
    module = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())
    module.register_module("missing", None)
    assert not compiler.has_compiled_part(module)
    module[0][1].compile(backend="eager")
    assert compiler.has_compiled_part(module)
    module[0][1] = torch.compile(nn.ReLU(), backend="eager")  # it has no length
    assert compiler.has_compiled_part(module)


def test_backends_are_found_by_name():
    assert compiler.lookup_backend("inductor").__module__.startswith("torch._dynamo.backends")


def test_partitioner_of_inductor_is_replaced_and_named_by_its_source(tmp_path):
    source = tmp_path / "partition.py"
    source.write_text("one")
    partitioner = compiler.inductor_partitioner(lambda graph, inputs, **options: (graph, inputs), str(source))
    assert partitioner("graph", "inputs") == ("graph", "inputs")
    assert partitioner.uuid() == partitioner.uuid()
    other = tmp_path / "other.py"
    other.write_text("two")
    assert compiler.inductor_partitioner(lambda *_: ("", ""), str(other)).uuid() != partitioner.uuid()


def test_limit_of_compilations_of_function_is_raised_and_restored():
    calls = []

    def run() -> int:
        torch.compiler.reset()
        calls.clear()

        def backend(graph: Any, inputs: Any) -> Any:
            calls.append(graph)
            return graph

        @partial(torch.compile, backend=backend, dynamic=False)
        def function(x: Tensor) -> Tensor:
            return x + 1

        for size in range(2, 6):
            function(torch.ones(size))
        return len(calls)

    with torch._dynamo.config.patch(recompile_limit=1):
        with compiler.recompile_limit(4, accumulated=4):
            assert run() == 4
        assert run() == 1
    torch.compiler.reset()
