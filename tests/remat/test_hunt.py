"""Random programs train with the bits of their truth when they are lean, and so do all that once did not."""

from __future__ import annotations

import pytest
import torch

from tests.remat.hunt import (
    RIGHT,
    WRONG,
    Program,
    Verdict,
    judge,
    program,
    programs,
    shrink,
    write,
)
from zoo.remat.operations import RULES

#: Programs that failed, by what they exercise.
FOUND: dict[str, Program] = {
    "A chunk of a recomputed value is read after the value itself was read for the last time.": program(
        forward="""
            c = conv(x, x, 0)
            h = norm(c, c, 0)
            ab = chunk(h, h, 0)
            k = half(h, h, 0)
            gl = chunk(k, k, 0)
            d = add(g, a, 0)
            d = linear(d, d, 0)
        """,
        returns="d", loss="d",
    ),
    "A small tensor with a history, which a recipe starts from, is returned and overwritten before backward.": program(
        forward="""
            c = conv(x, x, 0)
            h = norm(c, c, 0)
            a = half(e, e, 0)
            h = add(h, a, 0)
            d = conv(h, h, 0)
        """,
        between="""
            a = mul_(a, a, 0)
        """,
        returns="da", loss="d", smallest_bytes=100,
    ),
    "The backward of a function overwrites a recomputed value, which a convolution reads afterwards.": program(
        forward="""
            c = conv(x, x, 0)
            c = silu(c, c, 0)
            b = conv(c, c, 0)
            a = overwrites(c, c, 0)
        """,
        returns="ab", loss="ab",
    ),
    "The array that a uint8 input shares its memory with is refilled before backward.": program(
        forward="""
            a = normalized(u, u, 0)
            c = conv(a, a, 0)
        """,
        between="""
            a = refill_u_(x, x, 0)
        """,
        returns="c", loss="c",
    ),
    "The array that a float input shares its memory with is refilled between two backward passes.": program(
        forward="""
            a = shift(f, f, 0)
            b = norm_eval(f, f, 0)
            b = linear(a, a, 0)
        """,
        later="""
            g = refill_f_(x, x, 0)
        """,
        returns="b", loss="b", backward="retained",
    ),
    "A recipe starts from a running mean, which a batch norm then moves without a version.": program(
        forward="""
            h = clamp_by(x, x, 0)
            l = minus_mean(x, x, 0)
            d = norm(l, l, 0)
        """,
        returns="d", loss="d",
    ),
    "An operation on a list of tensors overwrites what sigmoid saved.": program(
        forward="""
            l = sigmoid(x, x, 0)
            d = foreach_(l, l, 0)
        """,
        returns="l", loss="l",
    ),
    "An operation on a list of tensors writes through a view of an input that a convolution saved.": program(
        forward="""
            l = conv_depthwise(f, f, 0)
            d = strided(f, f, 0)
            g = shift(l, l, 0)
            c = foreach_(d, d, 0)
            a = shift(g, g, 0)
        """,
        returns="a", loss="a",
    ),
    "A registered operator overwrites an input through a detached alias.": program(
        forward="""
            l = elu(x, x, 0)
            l = shrink_(x, x, 0)
        """,
        returns="l", loss="l",
    ),
    "A recomputation of a uint8 square and of its product with a float.": program(
        forward="""
            l = square(u, u, 0)
            l = matmul(l, y, 0)
        """,
        returns="l", loss="l",
    ),
    "A recomputation of the cube of a mask, times a float.": program(
        forward="""
            l = greater(x, x, 0)
            k = pow(l, l, 0)
            h = shift(k, k, 0)
            g = norm_eval(h, h, 0)
        """,
        returns="g", loss="g", smallest_bytes=300,
    ),
    "A sum with a tensor that inference mode made.": program(
        forward="""
            h = inference(x, x, 0)
            b = add(x, h, 0)
        """,
        returns="b", loss="b",
    ),
    "A product of tensors that inference mode made, with a budget that computes products again.": program(
        forward="""
            l = inference(x, x, 0)
            d = shift(l, l, 0)
            g = matmul(l, d, 0)
            k = mul(x, g, 0)
        """,
        returns="k", loss="k", budget="40 FLOP/B",
    ),
    "A part of a small leaf is read after an alias of another part was overwritten.": program(
        forward="""
            da = split_sizes(e, e, 0)
            a = grow_(a, a, 0)
            d = bits(d, d, 0)
            k = shift(e, e, 0)
        """,
        returns="k", loss="k", smallest_bytes=100,
    ),
    "A function overwrites what it saved, which is kept, before a convolution reads it.": program(
        forward="""
            l = times_parameter(x, x, 0)
            b = conv1(l, l, 0)
            l = overwrites(l, l, 0)
        """,
        returns="lb", loss="lb",
    ),
    "A registered operator overwrites an input that a sum's recipe starts from.": program(
        forward="""
            a = shift(x, x, 0)
            c = shrink_(x, x, 0)
            l = addcmul(x, a, 0)
        """,
        returns="l", loss="l",
    ),
    "The array that an input shares its memory with is refilled in forward, before a recipe starts from it.": program(
        forward="""
            a = shift(u, u, 0)
            b = shift(a, a, 0)
            l = refill_u_(x, x, 0)
            d = mul(x, b, 0)
        """,
        returns="d", loss="d",
    ),
    "A recipe starts from a part of a leaf whose memory was overwritten through an alias of that part.": program(
        forward="""
            a = iterate(x, x, 0)
            l = out(a, a, 0)
            k = conv_depthwise(x, x, 0)
            l = masked_fill(x, a, 0)
        """,
        returns="k", loss="k",
    ),
    "An empty product of matrices, where the budget is a share.": program(
        forward="""
            h = shift(e, e, 0)
            l = shift(h, h, 0)
            a = unbind(l, l, 0)
            ga = tensor_split(a, a, 1)
            h = matmul(a, g, 0)
            k = shift(e, e, 0)
        """,
        returns="k", loss="k", budget=0.3,
    ),
    "A saved view lies on the way of a recipe, and its base is overwritten.": program(
        forward="""
            g = sigmoid(x, x, 0)
            a = all(g, g, 0)
            g = detach(a, a, 0)
            d = div(x, g, 0)
            l = conv1(a, a, 0)
            c = shift(d, d, 0)
            a = tanh_half_(a, a, 0)
        """,
        returns="c", loss="c",
    ),
    "Overlapping windows of a tensor are overwritten.": program(
        forward="""
            a = conv1(x, x, 0)
            h = unfold(a, a, 0)
            l = tanh_(h, h, 0)
        """,
        returns="a", loss="a", budget="40 FLOP/B",
    ),
    "Backward runs inside of the recording.": program(
        forward="""
            g = channels_last(x, x, 0)
            d = shift(e, e, 0)
            a = shift(d, d, 0)
            l = maximum(g, a, 0)
        """,
        returns="l", loss="l", is_inside=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND, ids=str)
def test_a_program_that_once_failed_trains_rightly(name: str) -> None:
    verdict = judge(FOUND[name])
    assert not verdict.is_failure, verdict


def told(program: Program, verdict: Verdict) -> str:
    return f"{verdict.verdict}: {verdict.detail}\n{shrink(program, seconds=10.0)}"


def test_random_programs_train_rightly() -> None:
    for each, verdict in programs(200, seed=0):
        assert not verdict.is_failure, told(each, verdict)


@pytest.mark.exhaustive
def test_twenty_thousand_random_programs_train_rightly() -> None:
    for each, verdict in programs(20000, seed=1):
        assert not verdict.is_failure, told(each, verdict)


@pytest.mark.slow
def test_a_wrong_rule_is_found_and_its_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = torch.ops.aten.silu.default
    monkeypatch.setitem(RULES, silu, RULES[silu]._replace(repeat=torch.ops.aten.sigmoid.default))
    wrong = next(each for each, verdict in programs(2000, seed=0) if verdict.verdict == WRONG)
    smallest = shrink(wrong)
    assert judge(smallest).verdict == WRONG
    assert len(smallest.steps) <= 4
    assert "silu" in str(smallest)
    monkeypatch.undo()
    assert judge(smallest).verdict == RIGHT


def test_a_program_is_written_as_python_reads_it_and_depends_on_its_seed_alone() -> None:
    for seed in range(20):
        found, _ = write(seed)
        assert eval(str(found), {"program": program}) == found
        assert write(seed)[0] == found
