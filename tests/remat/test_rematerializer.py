"""A recording saves less than plain autograd and is bit-identical; failures are named errors."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.refusals import refused
from tests.remat.programs import FrozenBody, are_equal, assert_same, bytes_held, gradients, images, network
from tests.torch_internals.test_dispatch import Watch
from zoo.memory.held import HeldLog
from zoo.ops import backend, native
from zoo.remat import Rematerializer
from zoo.remat._budget import Budget
from zoo.remat._cost import ATTENTIONS, flops_of
from zoo.remat._exact_norms import apply_line
from zoo.remat._recipes import RecipeError
from zoo.remat._rules import RULES
from zoo.remat._step_log import StorageLog
from zoo.remat._tracking import SavedMemory, Tracker
from zoo.torch_internals.data import memory_id, storage_id

X, Y = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))


def test_no_repeated_operation_draws_random_numbers_or_writes() -> None:
    for operation, rule in RULES.items():
        functional = rule.repeat if rule.overwrites else operation  # a function of zoo may call it in another layout
        assert not functional._schema.is_mutable
        assert torch.Tag.nondeterministic_seeded not in functional.tags


def test_intermediate_shared_by_several_recipes_is_computed_once() -> None:
    convolutions = [nn.Conv2d(8 + 2 * layer, 2, 3, padding=1) for layer in range(4)]
    first = nn.Conv2d(3, 8, 3)
    with Rematerializer(smallest_bytes=0):
        features = [F.avg_pool2d(first(images()), 2)]
        for convolution in convolutions:
            features.append(convolution(torch.cat(features, 1).relu()))
        loss = torch.cat(features, 1).square().sum()
    with Watch() as watch:
        loss.backward()
    assert watch.seen.count("aten.avg_pool2d") == 1
    assert watch.seen.count("aten.relu") + watch.seen.count("aten.relu_") == 4


def test_recipes_start_from_small_outputs() -> None:
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
    log = HeldLog()
    with log.record(smallest_bytes=4096):
        # The mean of the small map is not saved by the interpolation, and gone when the convolution saves what it made.
        second(
            F.interpolate(first(images()[:, :, :5, :5]).mean(1, keepdim=True).expand(-1, 4, -1, -1), scale_factor=16)
        )
    (large,) = [each for each in log.memory() if each.plain > 4096]
    assert large.lean == 0


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize("has_shortcut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5, 9, 7), (2, 5, 3, 1), (2, 5, 8, 8, 2), (70, 5), (0, 5, 4, 4)], ids=str)
@pytest.mark.parametrize("back_end", ["reference", pytest.param("native", marks=needs_native)])
def test_each_step_of_program_is_bit_identical(
    back_end: str, shape: tuple[int, ...], dtype: torch.dtype, has_shortcut: bool, is_rectified: bool
) -> None:
    torch.manual_seed(0)
    x, shortcut = torch.randn((2, *shape), dtype=dtype)
    alpha, beta = torch.randn(2, 5, dtype=dtype)
    alpha[0] = beta[0] = -0.0
    x.view(-1)[::11] = torch.nan
    with torch.no_grad():
        expected = torch.addcmul(*(each.view(5, *[1] * (x.ndim - 2)) for each in (beta, alpha)), x)
        expected = expected + shortcut if has_shortcut else expected
        expected = expected.relu() if is_rectified else expected
    for layout in (torch.contiguous_format, torch.channels_last)[: 2 if x.ndim == 4 else 1]:
        term = shortcut.contiguous(memory_format=layout) if has_shortcut else None
        with backend.force_back_end(back_end):
            out = apply_line(x.contiguous(memory_format=layout), alpha, beta, term, is_rectified)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
        assert torch.equal(out.nan_to_num().signbit(), expected.nan_to_num().signbit())


def test_norm_sum_and_relu_are_recomputed_in_one_pass() -> None:
    norm, convolutions = nn.BatchNorm2d(4), [nn.Conv2d(3, 4, 3) for _ in range(2)]
    with Rematerializer(smallest_bytes=0) as recording:
        x, kept_shortcut = (convolution(images()) for convolution in convolutions)
        z = torch.relu_(norm(x) + kept_shortcut.relu() * kept_shortcut)
        value = recording._pass.tracker.find(z)
        assert value.recipe.operation is apply_line
        assert value.recipe.args[4] is True


def test_parts_of_dense_block_are_held_once() -> None:
    torch.manual_seed(0)
    convs = [nn.Conv2d(4 * (n + 1), 4, 3, padding=1) for n in range(6)]

    def forward() -> Tensor:
        features = [X.clone().requires_grad_()]
        for conv in convs:
            joined = torch.cat(features, 1)
            features.append(conv(F.relu(F.batch_norm(joined, None, None, training=True))))
        return torch.cat(features, 1).square().sum()

    held = bytes_held(forward, *convs)
    assert held < 1.2 * 7 * X.nbytes


@pytest.mark.usefixtures("no_collector")
def test_backward_frees_all_held_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    anchors: list[weakref.ref[Any]] = []
    original = SavedMemory.add_saved

    def add_saved(self: SavedMemory, tensor: Tensor) -> None:
        if tensor.grad_fn is not None and tensor.untyped_storage()._cdata not in own:
            anchors.append(weakref.ref(tensor.untyped_storage()))
        original(self, tensor)

    monkeypatch.setattr(SavedMemory, "add_saved", add_saved)
    with Rematerializer(smallest_bytes=0):
        out = model(images())
    out.sum().backward()
    del out
    assert anchors
    assert all(reference() is None for reference in anchors)


def long_chain(x: Tensor) -> Tensor:
    for _ in range(40):
        x = x.sin().exp()
    return x


def unread_chain(x: Tensor) -> Tensor:
    """Return outputs of a chain whose members backward does not read."""
    outputs = []
    for _ in range(40):
        x = x + 1
        outputs.append(x.flip(0).sin())
    return torch.stack(outputs)


def dense(x: Tensor) -> Tensor:
    features = [x]
    for _ in range(5):
        features.append(torch.cat(features).sin().cumsum(0)[:8] * 0.1)
    return torch.cat(features).exp()


CHAINS = [long_chain, unread_chain, dense]


@pytest.mark.parametrize("chain", CHAINS)
def test_each_operation_of_chain_is_recomputed_once(chain: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 64, requires_grad=True)
    with Watch() as forward:
        chain(x)
    with Rematerializer(smallest_bytes=0):
        out = chain(x)
    with Watch() as backward:
        out.sum().backward()
    for name in ("aten.sin", "aten.exp", "aten.cat"):
        assert backward.seen.count(name) + backward.seen.count(f"{name}_") <= forward.seen.count(name)


@pytest.mark.parametrize("chain", CHAINS)
def test_retained_graph_holds_no_recomputed_tensors(chain: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 64, requires_grad=True)
    recording = Rematerializer(smallest_bytes=0)
    for _ in range(2):
        with recording:
            loss = chain(x).sum()
        x.grad = None
        with StorageLog() as log:
            for _ in range(2):
                loss.backward(retain_graph=True)
                assert log.totals()[-1] == x.nbytes  # the gradient


@pytest.mark.usefixtures("no_collector")
def test_graph_without_backward_is_freed() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with Rematerializer(smallest_bytes=0):
        y = (x.cumsum(0).relu() + 1).sigmoid()
        out = y * y
    reference = weakref.ref(y)
    del y, out
    assert reference() is None


def test_input_overwritten_before_backward_raises() -> None:
    x = torch.randn(8, 8)
    weight = torch.randn(8, 8, requires_grad=True)
    with Rematerializer(smallest_bytes=0):
        out = (weight * x + weight * (x + 1).sigmoid()).sum()  # x is kept, so that the second product keeps a recipe
    x.add_(1)
    refused(RecipeError, out.backward, "(8, 8)", "version 1, not 0")


def test_recipe_detects_overwritten_parameter() -> None:
    norm, last = nn.LayerNorm(64), nn.Linear(64, 64)
    assert norm.weight._version > 0
    log = HeldLog()
    with log.record(parameters=[*norm.parameters(), *last.parameters()], smallest_bytes=1024):
        out = last(norm(torch.randn(32, 64, requires_grad=True) * 2))
    of_norm = [each.lean for each in log.memory() if each.made_by == "aten.native_layer_norm" and each.plain > 1024]
    assert of_norm == [0]
    with torch.no_grad():
        norm.weight.mul_(2)
    refused(RuntimeError, out.sum().backward, "modified")


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone], ids=["parameter", "buffer"])
def test_recipes_start_from_parameters_and_buffers_at_no_cost(kind: Any) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    factor = kind(torch.randn(2, 4, 8, 8))
    with Rematerializer(parameters=iter([*conv.parameters(), factor]), smallest_bytes=0) as recording:
        x = conv(torch.randn(2, 3, 8, 8))
        y = x * factor
        loss = (x * x + y * y).sum()
        value = recording._pass.tracker.find(y)
    assert value.saved_tensor is None  # its recipe is saved, as `factor` takes no memory of its own
    loss.backward()


def test_network_is_not_traversed_by_passes_that_follow_plan() -> None:
    model, budget, num_traversals = network(), Budget(), 0

    def parameters() -> Iterator[Tensor]:
        nonlocal num_traversals
        num_traversals += 1
        yield from model.parameters()

    for _ in range(4):
        with Rematerializer(budget, parameters=parameters()):
            loss = model(images(64)).sum()
        loss.backward()
    assert num_traversals == 1


def test_memory_at_a_freed_address_has_no_writes() -> None:
    tracker = Tracker(SavedMemory(list), smallest_bytes=0)
    written = torch.zeros(64)
    tracker.note_writes([written])
    assert tracker.has_writes(written.view(8, 8))
    address = memory_id(written)
    del written
    others = [torch.zeros(64)]
    while memory_id(others[-1]) != address and len(others) < 1000:
        others.append(torch.zeros(64))
    assert memory_id(others[-1]) == address, "the allocator did not reuse the address"
    assert not tracker.has_writes(others[-1])


def test_only_live_memory_counts_as_saved() -> None:
    """Otherwise a new tensor at the address of a freed one would be taken for saved, and saved itself."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    with Rematerializer(parameters=conv.parameters(), smallest_bytes=4096) as rematerializer:
        maps = conv(torch.randn(2, 3, 16, 16))
        pooled = F.max_pool2d(maps, 4)
        large = F.interpolate(pooled.exp(), scale_factor=8.0, mode="bilinear")
        loss = (large * large.sigmoid()).sum()
        del maps, pooled, large
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance reads deprecated attributes of torch
            tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        alive = {storage_id(tensor.untyped_storage()) for tensor in tensors if tensor.layout == torch.strided}
        assert rematerializer._pass.saved - alive == set()
    loss.backward()


def test_smaller_input_stays_alive_until_its_recipe_is_decided() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        small = (x * y).cumsum(0)
        large = F.interpolate(small, scale_factor=2.0, mode="bilinear")
        del small
        return large * F.interpolate(large, scale_factor=0.5).mean()

    log = HeldLog()
    assert_same(program, X, Y, log=log)
    (large,) = [each for each in log.memory() if each.made_by == "aten.upsample_bilinear2d"]
    assert (large.plain > 0, large.lean) == (True, 0)


def test_recipe_starts_from_view_of_freed_inputs() -> None:
    linear = nn.Linear(36, 36)

    def program(x: Tensor, y: Tensor) -> Tensor:
        maps = linear(x.flatten(2)) * 2  # the product is freed
        return maps.unsqueeze(0).expand(3, -1, -1, -1).contiguous() ** 2

    budget = Budget()
    for _ in range(2):  # the maps stay alive for a plan
        log = HeldLog()
        assert_same(program, X, Y, log=log, parameters=linear.parameters(), budget=budget)
    assert sum(each.lean for each in log.memory()) == X.nbytes  # the maps


def test_recipe_may_start_from_input_of_its_size() -> None:
    def quick_gelu(x: Tensor, y: Tensor) -> Tensor:
        x = (x * y).cumsum(0)
        return x * torch.sigmoid(1.702 * x)

    log = HeldLog()
    assert_same(quick_gelu, X, Y, log=log)
    (gate,) = [each for each in log.memory() if each.made_by == "aten.sigmoid"]
    assert (gate.plain, gate.lean) == (X.nbytes, 0)


def test_attention_is_recomputed_where_budget_allows_it() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        query, key = torch.randn(2, 2, 4, 64, 8, generator=torch.Generator().manual_seed(0))
        mask = torch.zeros(64, 64).masked_fill(torch.eye(64) > 0, -torch.inf)
        query = query * x.mean()
        plain = F.scaled_dot_product_attention(query, key, query)
        return F.scaled_dot_product_attention(plain * y.mean(), key, query, attn_mask=mask).square()

    for budget, is_recomputed in ((None, False), (0.01, True)):
        parsed = Budget.parse(budget)
        for _ in range(2):
            log = HeldLog()
            assert_same(program, X, Y, log=log, budget=parsed)
        outputs = [each for each in log.memory() if "attention" in each.made_by and each.plain]
        assert outputs
        assert any(each.lean == 0 for each in outputs) == is_recomputed


@pytest.mark.parametrize(
    ("rank", "width", "is_kept"),
    [(16, 144, False), (16, 72, True), (24, 288, True)],
    ids=["low rank", "narrow", "high rank"],
)
def test_products_of_low_rank_are_recomputed_without_budget(rank: int, width: int, is_kept: bool) -> None:
    down, up = torch.randn(6, rank), nn.Parameter(torch.randn(rank, width))  # its gradient needs the input

    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x @ down @ up) * y.flatten()[:width]

    log = HeldLog()
    assert_same(program, X, Y, log=log)
    (product,) = [
        each for each in log.memory() if each.made_by == "aten.mm" and each.plain == 4 * X[..., 0].numel() * width
    ]
    assert (product.lean > 0) is is_kept


def test_attention_with_dropout_has_no_cost() -> None:
    query = torch.randn(2, 4, 16, 8)
    for operation, position in ATTENTIONS.items():
        args = [query, query, query, *[None] * (position - 3)]
        assert (
            flops_of(operation, (*args, 0.0), (query, None))
            == flops_of(operation, tuple(args), query)
            == 4 * 2 * 4 * 16 * 16 * 8
        )
        assert flops_of(operation, (*args, 0.1), (query, None)) is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_frozen_norms", [True, False])
def test_frozen_layers_are_bit_identical(has_frozen_norms: bool, dtype: torch.dtype, layout: Any) -> None:
    model = FrozenBody(has_frozen_norms).to(dtype, memory_format=layout)
    x = images(16).to(dtype, memory_format=layout)
    x[0, 0, 3] = torch.nan
    results = []
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for is_lean in (False, True):
            with Rematerializer(smallest_bytes=0, parameters=model.parameters()) if is_lean else nullcontext():
                out = model(x)
            (out.float().nan_to_num() * out.float()).sum().backward()
            results.append([each.nan_to_num(7) for each in (out, *gradients(model))])
            model.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    assert are_equal(*results)


def test_frozen_layers_hold_only_signs() -> None:
    model, x = FrozenBody(), images(16)
    log = HeldLog()
    with log.record(smallest_bytes=0, parameters=[*model.parameters(), *model.buffers()]) as recording:
        recording._pass.frozen.is_seen = True  # as after the first frozen layer
        out = model(x)
    held = {each.made_by for each in log.memory() if each.plain and each.lean}
    assert held == {"aten.max_pool2d_with_indices", "aten.avg_pool2d"}  # indices, input of the head
    signs = [each.plain for each in log.memory() if "relu" in each.made_by]
    assert signs == [2 * 8 * 16 * 16 * 4] * 4 + [2 * 8 * 8 * 8 * 4]
    assert sum(each.lean for each in log.memory() if each.made_by == "zoo.lean") == sum(signs) // 32
    out.sum().backward()


@pytest.mark.usefixtures("no_collector")
def test_relu_output_is_freed_with_last_reference() -> None:
    frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
    with Rematerializer(smallest_bytes=0):
        maps = frozen(frozen(X.clone().requires_grad_()))
        maps = F.relu(maps)
        reference = weakref.ref(maps.untyped_storage())
        maps = frozen(maps)
        out = frozen(maps)
        assert reference() is None
    out.sum().backward()


@pytest.mark.parametrize(
    ("kib", "is_kept"), [(3, (True, True)), (5, (False, True)), (17, (False, True)), (65, (False, False))]
)
def test_small_tensors_are_saved(kib: int, is_kept: tuple[bool, bool]) -> None:
    """The plan of the second pass finds some others not worth an operation in backward."""
    weight, budget, found = torch.ones(kib * 256, requires_grad=True), Budget(), []
    for _ in range(2):
        log = HeldLog()
        with log.record(budget, parameters=[weight]):
            (weight * 2).square().sum().backward()
        found += [each.lean > 0 for each in log.memory() if each.made_by == "aten.mul" and each.plain]
    assert tuple(found) == is_kept


def test_buffer_of_small_network_may_be_overwritten() -> None:
    buffer, weight = torch.rand(2**13), torch.rand(2**13, requires_grad=True)
    with Rematerializer(parameters=[buffer, weight]):
        out = ((buffer + 1) * weight).square().sum()  # saves buffer + 1, a recipe
    buffer.zero_()
    out.backward()
