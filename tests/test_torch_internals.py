"""Each behavior of torch's private names that the package relies on has a test, and no other file uses such names."""

from __future__ import annotations

import ast
import os
import signal
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from zoo import torch_internals as internals

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch 2.11's own compiler

ROOT = Path(__file__).parents[1]
INTERNALS = "zoo/torch_internals.py"
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Watch(internals.TorchDispatchMode):
    """Notes the names of the operations that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


# Dispatch


def test_active_modes_are_counted():
    assert internals.num_dispatch_modes() == 0
    with Watch(), Watch():
        assert internals.num_dispatch_modes() == 2
    assert internals.num_dispatch_modes() == 0


def test_disabled_dispatch_hides_operations_from_modes():
    with Watch() as watch:
        with internals.DisableTorchDispatch():
            assert torch.equal(torch.ones(2).exp(), torch.full((2,), torch.e))
        assert watch.seen == []
        torch.ones(2)
    assert watch.seen == ["aten.ones"]


def test_modes_around_a_context_are_inactive_in_it_and_modes_inside_are_active():
    with Watch() as around, internals.without_dispatch_modes(), Watch() as inside:
        torch.ones(2)
    assert around.seen == []
    assert inside.seen == ["aten.ones"]


def test_a_tensor_is_detached_below_dispatch_modes():
    x = torch.ones(4, requires_grad=True).exp()[1:]
    with Watch() as watch:
        alias = internals.detach(x)
    assert watch.seen == []
    assert type(alias) is Tensor
    assert not alias.requires_grad
    assert (alias.stride(), internals.memory_id(alias)) == (x.stride(), internals.memory_id(x))
    with torch.no_grad():
        x.add_(1)
    assert alias._version == x._version == 1


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_transforms_are_active_inside_of_them_alone(transform):
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(internals.are_transforms_active())
        return x.sum()

    transform(function)(torch.ones(2))
    assert seen == [True]
    assert not internals.are_transforms_active()


@pytest.mark.parametrize("kind", ["mm", "convolution"])
def test_without_autograd_and_autocast_kernels_get_their_arguments_as_given(kind):
    end = (1, 1) if kind == "convolution" else ()
    x, weight = torch.ones(4, 4, *end), torch.ones(4, 4, *end, requires_grad=True)
    function = nn.functional.conv2d if kind == "convolution" else torch.mm
    with torch.autocast("cpu", torch.bfloat16):
        cast = function(x, weight)
        with internals.skip_autograd_and_autocast():
            plain = function(x, weight)
    assert (cast.dtype, cast.requires_grad) == (torch.bfloat16, True)
    assert (plain.dtype, plain.requires_grad) == (torch.float32, False)


def test_without_autograd_views_count_writes_and_dispatch_modes_are_called():
    x = torch.ones(2)
    with Watch() as watch, internals.skip_autograd_and_autocast():
        x[1:].add_(1)
    assert watch.seen == ["aten.slice", "aten.add_"]
    assert x._version == 1


def test_the_modes_of_selective_checkpoints_are_told_from_others():
    assert internals.TorchDispatchMode not in internals.SELECTIVE_CHECKPOINT_MODES  # all names were found
    seen: list[list[bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append([isinstance(mode, internals.SELECTIVE_CHECKPOINT_MODES) for mode in internals.dispatch_modes()])
        return x.sin().exp()

    save_sines = partial(
        create_selective_checkpoint_contexts,
        lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if operation == torch.ops.aten.sin.default else CheckpointPolicy.MUST_RECOMPUTE
        ),
    )
    with Watch():
        x = torch.ones(2, requires_grad=True)
        checkpoint(function, x, use_reentrant=False, context_fn=save_sines).sum().backward()
    assert [modes.count(True) for modes in seen] == [1, 1]  # in forward and in recomputation
    assert not isinstance(Watch(), internals.SELECTIVE_CHECKPOINT_MODES)


# Autograd and memory


def test_an_operation_that_saves_its_output_differs_from_the_next_that_saves_it_as_input():
    found = []

    def pack(tensor):
        found.append((tensor.grad_fn.name(), internals.saves_its_output(tensor)))
        return tensor

    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = (2 * x).relu()
        z = torch.relu_(y.square())
        z.exp_()
    relu = "ReluBackward0"
    assert found == [(relu, True), (relu, False), (relu, True), ("ExpBackward0", True)]


def test_hooks_for_saved_tensors_are_hidden_while_aot_autograd_traces_unless_that_is_ignored():
    set_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        before = set_tracing(True)
        try:
            found = [internals.top_saved_tensors_hooks(ignore) is not None for ignore in (False, True)]
        finally:
            set_tracing(before)
    assert found == [False, True]


def test_tensors_share_the_id_of_a_storage_if_they_share_memory():
    x = torch.ones(4)
    storage = internals.storage_id(x.untyped_storage())
    assert internals.storage_id(x[2:].untyped_storage()) == storage
    assert internals.storage_id(x.detach().untyped_storage()) == storage
    assert internals.storage_id(x.clone().untyped_storage()) != storage
    assert internals.memory_id(x[2:]) == internals.memory_id(nn.Parameter(x)) == storage
    meta = [torch.empty(4, device="meta") for _ in range(2)]  # whose storages have no address
    assert len({internals.storage_id(x.untyped_storage()) for x in meta}) == 2


def test_the_versions_of_tensors_can_be_set_so_that_autograd_does_not_see_a_write():
    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    z = (x * y).sum()
    x.add_(1)
    internals.set_versions([x], [x._version - 1])
    assert x._version == 0
    z.backward()
    assert y.grad.tolist() == [2, 2]


def test_elements_overlap_in_windows_and_not_in_dense_tensors():
    x = torch.ones(2, 4, 3, 3)
    assert not internals.may_overlap(x)
    assert not internals.may_overlap(x.contiguous(memory_format=torch.channels_last).transpose(1, 2))
    assert internals.may_overlap(x.unfold(3, 2, 1))
    assert internals.may_overlap(x[:, :, :1].expand(-1, -1, 5, -1))


# Modules


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_every_kind_of_hook_of_a_module_is_seen(kind):
    module, other = nn.Identity(), nn.Identity()
    handle = getattr(module, f"register_{kind}")(lambda *args: None)
    assert internals.has_hooks(module)
    assert not internals.has_hooks(other)
    handle.remove()
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *args: None)
    try:
        assert internals.has_hooks(other)
    finally:
        handle.remove()
    assert not internals.has_hooks(module)


# Compiler


def test_the_compiler_neither_traces_a_disabled_function_nor_what_it_calls():
    compiling = []

    def called() -> None:
        compiling.append(torch.compiler.is_compiling())

    @internals.disable_compiler
    def disabled(x: Tensor) -> Tensor:
        called()
        return x + 1

    @partial(torch.compile, backend="eager")
    def function(x: Tensor) -> Tensor:
        return disabled(x * 2) * 3

    assert float(function(torch.ones(()))) == 9
    assert compiling == [False]


def test_a_compiled_part_of_a_module_is_found():
    module = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ReLU())
    module.register_module("missing", None)
    assert not internals.has_compiled_part(module)
    module[0][1].compile(backend="eager")
    assert internals.has_compiled_part(module)
    module[0][1] = torch.compile(nn.ReLU(), backend="eager")  # whose length is not defined
    assert internals.has_compiled_part(module)


def test_backends_are_found_by_name():
    assert internals.lookup_backend("inductor").__module__.startswith("torch._dynamo.backends")


def test_the_partitioner_of_inductor_is_replaced_and_named_by_its_source(tmp_path):
    source = tmp_path / "partition.py"
    source.write_text("one")
    partitioner = internals.inductor_partitioner(lambda graph, inputs, **options: (graph, inputs), str(source))
    assert partitioner("graph", "inputs") == ("graph", "inputs")
    assert partitioner.uuid() == partitioner.uuid()
    other = tmp_path / "other.py"
    other.write_text("two")
    assert internals.inductor_partitioner(lambda *_: ("", ""), str(other)).uuid() != partitioner.uuid()


def test_workers_of_a_loader_end_and_those_that_hang_are_killed():
    loader = DataLoader(range(4), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    os.kill(workers[0].pid, signal.SIGSTOP)
    start = time.monotonic()
    internals.end_workers(iterator, grace_s=0.5)
    assert time.monotonic() - start < 30  # torch waits without a limit
    assert not any(worker.is_alive() for worker in workers)


def test_the_limit_of_compilations_of_a_function_is_raised_and_restored():
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
        with internals.recompile_limit(4, accumulated=4):
            assert run() == 4
        assert run() == 1
    torch.compiler.reset()


@pytest.mark.slow
def test_the_break_after_a_graph_is_known():
    found = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(internals.graph_break(graph))
        return graph

    @partial(torch.compile, backend=backend)
    def function(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y * 2

    torch.compiler.reset()
    function(torch.ones(1))
    assert found[0] is not None
    assert f"{__file__}, line " in found[0]
    assert found[1] is None
    torch.compiler.reset()


@pytest.mark.slow
def test_the_nodes_of_compiled_backward_are_known():
    x = torch.ones(2, requires_grad=True)
    y = torch.compile(lambda x: x.sin(), backend="aot_eager")(x)
    assert internals.is_compiled_node(y.grad_fn)
    assert not internals.is_compiled_node(x.sin().grad_fn)
    assert not internals.is_compiled_node(None)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_restart_of_tracing_is_told_from_other_errors():
    assert issubclass(torch._dynamo.exc.TensorifyScalarRestartAnalysis, torch._dynamo.exc.RestartAnalysis)
    assert internals.restarts_tracing(torch._dynamo.exc.TensorifyScalarRestartAnalysis())
    assert not internals.restarts_tracing(RuntimeError())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_the_choice_of_cudnn_is_that_of_eager_training(device):
    x, vectors = torch.randn(2, 3, 4, 5, device=device), [torch.ones(3, device=device) for _ in range(4)]
    called = []

    class Log(internals.TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            called.append(operation)
            return operation(*args, **(kwargs or {}))

    weight, bias, *running = vectors
    for vectors, training in (
        ((weight, bias, *running), True),
        ((weight, bias, *running), False),
        ((weight, bias, None, None), True),
        ((None, None, *running), True),
    ):
        called.clear()
        with Log():
            nn.functional.batch_norm(x, *vectors[2:], *vectors[:2], training)
        chosen = internals.chooses_cudnn(x, *vectors, training, 1e-5)
        assert chosen is (torch.ops.aten.cudnn_batch_norm.default in called)
        assert chosen is (device == "cuda" and vectors[0] is not None)
        if chosen:
            reserve = torch.ops.aten.cudnn_batch_norm(x, *vectors, training, 0.1, 1e-5)[3]
            assert internals.cudnn_reserve_bytes(x, training) == reserve.numel()


# No other file

#: Attributes that are no more private in practice than the documented ones, and that a function around them would only
#: hide or slow down; tests above state what the package relies on.
SEMI_PUBLIC = {
    "_version": "the version counter of a tensor, which error messages of torch name",
    "_parameters": "torch.nn.Module's own dictionary: None where a parameter is missing",
    "_buffers": "torch.nn.Module's own dictionary: None where a buffer is missing",
    "_modules": "torch.nn.Module's own dictionary: a module may be in it under several names",
}

#: Private names of other packages.
NOT_OF_TORCH = {
    "_SubParsersAction": "argparse, whose classes of parsers and groups have no public names",
    "_replace": "typing.NamedTuple, documented",
    "_init_handles": "triton, which loads compiled code with it",
}


def _names_of_its_own(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, and what it assigns to variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and name.strip("_") != ""


def _private_names(tree: ast.AST) -> list[tuple[int, str, str]]:
    """Return (line, what it is of, name) of the private names that a file reads of modules and objects."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, ast.unparse(node.value), node.attr))
            continue
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found.append((node.lineno, ast.unparse(node.args[0]), name))
            continue
        else:
            continue
        for module, name in paths:
            if module.split(".")[0] == "torch":
                found += [(node.lineno, module, part) for part in [*module.split("."), name]]
    return [each for each in found if _is_private(each[2]) and not each[2].startswith("__")]


@cache
def _trees() -> dict[str, ast.AST]:
    paths = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "zoo").rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if name != INTERNALS}


def test_no_other_file_uses_a_private_name_of_torch():
    trees = _trees()
    of_package = set().union(*map(_names_of_its_own, trees.values()))
    found = []
    for file, tree in trees.items():
        own = _names_of_its_own(tree)
        for line, owner, name in _private_names(tree):
            known = of_package if owner in ("self", "cls", "super()") else own
            is_torch = owner.split(".")[0] == "torch"
            if is_torch or name not in known | SEMI_PUBLIC.keys() | NOT_OF_TORCH.keys():
                found.append(f"{file}:{line}: {owner}.{name}")
    assert found == [], f"give these names a place in {INTERNALS}"


def test_every_exception_is_used():
    used = {name for tree in _trees().values() for _, _, name in _private_names(tree)}
    assert used >= SEMI_PUBLIC.keys() | NOT_OF_TORCH.keys()
