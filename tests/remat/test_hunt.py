"""Random programs, and all programs that once failed, compute the same bits with and without lean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.remat.hunt.judge import (
    RIGHT,
    WRONG,
    Verdict,
    compiled_programs,
    judge,
    judge_compiled,
    programs,
    shrink,
)
from tests.remat.hunt.programs import Program, program
from tests.remat.hunt.writer import write
from zoo.remat import recording
from zoo.remat.inductor import partition
from zoo.remat.rules import RULES, rule_of

#: Programs that failed, with the reason.
FOUND: dict[str, Program] = {
    "A product is overwritten through its reshaped output, which counts versions of its own, after relu.": program("""
        b = linear(x)
        d = relu(b)
    """, between="""
        g = set_all(b, f)
    """, returns="bd", loss="d"),
    "A product is overwritten through its reshaped output, which counts its own versions, in a budget.": program("""
        b = linear(x)
        d = sin(b)
    """, between="""
        g = mul_(b)
    """, returns="bd", loss="d", budget=0.3),
    "A chunk of a recomputed value is read after the value itself was read for the last time.": program("""
        c = conv(x)
        h = norm(c)
        ab = chunk(h)
        k = half(h)
        gl = chunk(k)
        d = add(g, a)
        d = linear(d)
    """, returns="d"),
    "A small tensor with a history, the start of a recipe, is returned and overwritten before backward.": program("""
        c = conv(x)
        h = norm(c)
        a = half(e)
        h = add(h, a)
        d = conv(h)
    """, between="""
        a = mul_(a)
    """, returns="da", loss="d", smallest_bytes=100),
    "A small saved tensor becomes the input of a recipe that nothing needs, which starts from a copy.": program("""
        k = shift(e)
        c = addcmul(k, y)
        a = conv1(k)
        k = matmul(x, c)
        lah = unbind1(a)
    """, returns="h", smallest_bytes=100),
    "The copy of a small saved tensor is freed within forward with the recipe that starts from it.": program("""
        a = addcmul(e, f)
        l = shift(e)
        c = addcmul(e, l)
        a = sin(e, l, 1)
        k = channels_last(e, l)
        g = resize(e, a, 1)
        l = maximum(g, u)
        l = exp(c, x, 2)
        h = pow(k, c, 2)
        k = elu(g, h)
    """, returns="d", smallest_bytes=100),
    "The backward of a function overwrites a recomputed value, which a convolution reads afterwards.": program("""
        c = conv(x)
        c = silu(c)
        b = conv(c)
        a = overwrites(c)
    """, returns="ab"),
    "The array that a uint8 input shares its memory with is refilled before backward.": program("""
        a = normalized(u)
        c = conv(a)
    """, between="""
        a = refill_u_(x)
    """, returns="c"),
    "The array that a float input shares its memory with is refilled between two backward passes.": program("""
        a = shift(f)
        b = norm_eval(f)
        b = linear(a)
    """, later="""
        g = refill_f_(x)
    """, returns="b", backward="retained"),
    "A recipe starts from a running mean, which a batch norm then moves without a version.": program("""
        h = clamp_by(x)
        l = minus_mean(x)
        d = norm(l)
    """, returns="d"),
    "An operation on a list of tensors overwrites what sigmoid saved.": program("""
        l = sigmoid(x)
        d = foreach_(l)
    """, returns="l"),
    "A registered operator overwrites an input through a detached alias.": program("""
        l = elu(x)
        l = shrink_(x)
    """, returns="l"),
    "A recomputation of a uint8 square and of its product with a float.": program("""
        l = square(u)
        l = matmul(l, y)
    """, returns="l"),
    "A sum with a tensor that inference mode made.": program("""
        h = inference(x)
        b = add(x, h)
    """, returns="b"),
    "A part of a small leaf is read after an alias of another part was overwritten.": program("""
        da = split_sizes(e)
        a = grow_(a)
        d = bits(d)
        k = shift(e)
    """, returns="k", smallest_bytes=100),
    "A function overwrites what it saved, which is kept, before a convolution reads it.": program("""
        l = times_parameter(x)
        b = conv1(l)
        l = overwrites(l)
    """, returns="lb"),
    "The array that an input shares its memory with is refilled in forward before a recipe reads it.": program("""
        a = shift(u)
        b = shift(a)
        l = refill_u_(x)
        d = mul(x, b)
    """, returns="d"),
    "A recipe starts from a part of a leaf whose memory was overwritten through an alias of that part.": program("""
        a = iterate(x)
        l = out(a)
        k = conv_depthwise(x)
        l = masked_fill(x, a)
    """, returns="k"),
    "An empty product of matrices, where the budget is a share.": program("""
        h = shift(e)
        l = shift(h)
        a = unbind(l)
        ga = tensor_split(a, 1)
        h = matmul(a, g)
        k = shift(e)
    """, returns="k", budget=0.3),
    "A saved view lies on the way of a recipe, and its base is overwritten.": program("""
        g = sigmoid(x)
        a = all(g)
        g = detach(a)
        d = div(x, g)
        l = conv1(a)
        c = shift(d)
        a = tanh_half_(a)
    """, returns="c"),
    "Overlapping windows of a tensor are overwritten.": program("""
        a = conv1(x)
        h = unfold(a)
        l = tanh_(h)
    """, returns="a", budget=0.3),
    "A checkpoint saves what a frozen convolution and a ReLU in place have computed.": program("""
        a = frozen_checkpoint(x)
    """, returns="a"),
    "A norm without weights chooses its kernel by its running statistics, under autocast.": program("""
        a = norm_cast_tracked(x)
    """, returns="a"),
    "A norm of bfloat16 without weights chooses its kernel by its running statistics.": program("""
        a = norm_of_bfloat16(x)
    """, returns="a"),
    "A max pool to one element is enlarged, and then viewed.": program("""
        a = wide_max_pool_1(x, y)
        b = adaptive_avg_pool(a, 2)
        c = rows(b)
    """, returns="c"),
    "A max pool to one element has other strides.": program("""
        a = wide_max_pool_1(x, y)
        b = adaptive_avg_pool(a, 1)
        c = by_stride(b)
    """, returns="c"),
    "A norm of one image with a stride that nothing reads has other strides.": program("""
        a = wide(x, y)
        a = row(a)
        a = other_strides(a)
        b = norm_plain(a)
        b = by_stride(b)
    """, returns="b"),
    "An operator under autocast calls a matrix product in its kernel.": program("""
        a = spatial_transformer(x)
    """, returns="a"),
    "The data of an activation is replaced after its use.": program("""
        a = conv(x)
        b = silu(a)
        b = binarized_(a)
        c = silu(a)
        d = conv(c)
    """, returns="d"),
    "The data of a buffer is replaced after its use.": program("""
        c = codebook(x)
    """, returns="c", is_module=True),
    "A condition of tensors chooses a branch.": program("""
        a = cond(x)
    """, returns="a"),
    "A loop runs while tensors say so.": program("""
        a = while_loop(x)
    """, returns="a"),
    "Backward runs inside of the recording.": program("""
        g = channels_last(x)
        d = shift(e)
        a = shift(d)
        l = maximum(g, a)
    """, returns="l", is_inside=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND, ids=str)
def test_regression_program_trains_correctly(name: str) -> None:
    verdict = judge(FOUND[name])
    assert not verdict.is_failure, verdict


def describe(program: Program, verdict: Verdict) -> str:
    return f"{verdict.verdict}: {verdict.detail}\n{shrink(program, seconds=10.0)}"


@pytest.mark.parametrize(
    ("count", "seed"), [*((25, seed) for seed in range(8)), pytest.param(20000, 8, marks=pytest.mark.exhaustive)]
)
def test_random_programs_train_correctly(count: int, seed: int) -> None:
    for each, verdict in programs(count, seed):
        assert not verdict.is_failure, describe(each, verdict)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("count", "seed"), [(5, 0), pytest.param(200, 2, marks=pytest.mark.exhaustive)])
def test_random_programs_have_results_of_inductor_with_lean_rule(count: int, seed: int) -> None:
    for each, verdict in compiled_programs(count, seed):
        assert not verdict.is_failure, f"{verdict.verdict}: {verdict.detail}\n{each}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wrong_recomputation_by_inductor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = partition._Rewriting._call

    def call_wrongly(self: Any, user: Any, target: Any, *others: Any) -> Any:
        aten = torch.ops.aten
        return call(self, user, aten.add.Tensor if target is aten.mul.Tensor else target, *others)

    found = program("a = conv(x)\nb = sigmoid(a)\nc = mul(b, b)\nd = conv(c)", returns="d", smallest_bytes=0)
    assert judge_compiled(found).verdict == RIGHT
    monkeypatch.setattr(partition._Rewriting, "_call", call_wrongly)
    assert judge_compiled(found).verdict == WRONG


@pytest.mark.slow
def test_wrong_rule_is_found_and_its_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = torch.ops.aten.silu.default
    monkeypatch.setattr(recording, "_traits", {})
    monkeypatch.setitem(RULES, silu, rule_of(silu)._replace(repeat=torch.ops.aten.sigmoid.default))
    wrong = next(each for each, verdict in programs(2000, seed=0) if verdict.verdict == WRONG)
    smallest = shrink(wrong)
    assert judge(smallest).verdict == WRONG
    assert len(smallest.steps) <= 4
    calling_it = {"silu", "silu_", "autocast", "norm_cast", "norm_cast_tracked", "norm_of_bfloat16"}
    assert calling_it & {step.name for step in smallest.steps}
    monkeypatch.undo()
    assert judge(smallest).verdict == RIGHT


def test_program_round_trips_and_depends_only_on_seed() -> None:
    for seed in range(20):
        found, _ = write(seed)
        assert eval(str(found), {"program": program}) == found
        assert write(seed)[0] == found
