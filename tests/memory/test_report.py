"""The memory report of a network adds up to the bytes held by its modules, and changes nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.refusals import refused
from tests.remat.programs import Block, Checkpointed, Scalar, images, network, peak
from zoo.memory.allocations import measure_memory
from zoo.remat._lean import is_lean, lean
from zoo.torch_internals.dispatch import top_saved_tensors_hooks


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of the distinct tensors that autograd saves for the loss of a model."""
    storages: dict[int, int] = {}
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model(images(64))
    return sum(storages.values())


def test_sums_equal_bytes_held_by_autograd() -> None:
    model = network(channels=16)
    report = zoo.memory_report(model, images(64))
    assert report.plain == held_bytes(model) - images(64).nbytes
    assert 0 < report.lean < 0.7 * report.plain
    by_name = {module.name: module for module in report.modules}
    assert by_name["1.norms.0"].held == {
        ("aten.convolution", "recomputed only if the budget allows it"): 4 * 2 * 16 * 64**2,
        ("aten.native_batch_norm", "small"): 4 * 2 * 16,  # mean and inverse deviation
        ("zoo.lean", "input of a recipe"): 4 * 2 * 16,  # a copy of them
    }
    assert by_name["1.relu"].lean == 0
    assert set(by_name["1.relu"].recomputed) == {"aten.relu_"}
    table = report.table().splitlines()
    assert table[-1].split("|")[1].strip() == "all"
    held = [module.name for module in report.modules if max(module.plain, module.lean) >= 5000]
    assert [line.split("|")[1].strip() for line in table[2:-1]] == held
    assert len(held) < len(report.modules)  # the last linear layer holds 128 bytes
    assert "aten.native_batch_norm" not in report.table()


def selective_scan(x: Tensor, first: nn.Module) -> Tensor:
    gates = (first(x)[..., None] * torch.linspace(-1, 0, 4)).exp()  # batch, time, channels, states
    state, outputs = torch.zeros_like(gates[:, 0]), []
    for step in range(x.shape[1]):
        state = gates[:, step] * state + x[:, step, :, None]
        outputs.append(state.sum(-1))
    return torch.stack(outputs, 1)


def heads_of_clone(x: Tensor, first: nn.Module) -> Tensor:
    q, k, v = first(x).clone().view(*x.shape[:2], 3, 4, -1).unbind(2)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
    return scores @ v.transpose(1, 2)


def gated(x: Tensor, first: nn.Module) -> Tensor:
    a, b = F.layer_norm(first(x), (192,)).chunk(2, -1)
    return a.sigmoid() * b.tanh()


def attention_by_heads(x: Tensor, first: nn.Module) -> Tensor:
    heads = F.gelu(first(x)).split(24, -1)
    return torch.cat([(head @ head.mT).softmax(-1) @ head for head in heads], -1)


def clones(x: Tensor, first: nn.Module) -> Tensor:
    y = first(x).sigmoid()
    return (y * y.clone()).exp() + y.clone().sin() + y.transpose(1, 2).contiguous().exp().mT


def linear(outputs: int = 64) -> nn.Module:
    return nn.Linear(64, outputs)


def conv(inputs: int = 64, outputs: int = 64, size: int = 3) -> nn.Module:
    return nn.Conv1d(inputs, outputs, size)


def frozen() -> nn.Module:
    return conv().requires_grad_(False)


def normed() -> nn.Module:
    return nn.Sequential(conv(64, 32), nn.BatchNorm1d(32), nn.SiLU(), conv(32), nn.BatchNorm1d(64), nn.ReLU(True))


#: Functions of an input and layers with views of each kind: by unbind, split, chunk, expand, transpose, unfold, slices.
VIEWING: dict[str, tuple[Callable[..., Any], ...]] = {
    "selective scan": (selective_scan, linear),
    "heads of one clone": (heads_of_clone, partial(linear, 192)),
    "unbind over time": (lambda x, a: torch.stack([h.sin() * h.exp() for h in a(x).tanh().unbind(1)]), linear),
    "split": (attention_by_heads, partial(linear, 192)),
    "chunk of a norm": (gated, partial(linear, 192)),
    "expand": (lambda x, a: a(x).exp()[:, :, None].expand(-1, -1, 4, -1).sin(), linear),
    "transposed": (lambda x, a: a(x).tanh().mT.exp() @ a(x).tanh(), linear),
    "windows": (lambda x, a: a(x).sigmoid().unfold(1, 8, 4).sin().exp(), linear),
    "slices": (lambda x, a: (h := a(x).sigmoid())[:, :32].sin() * h[:, 16:48].exp() + h[:, 32:], linear),
    "diagonal": (lambda x, a: a(x).exp().diagonal(dim1=1, dim2=2).sin(), linear),
    "clones": (clones, linear),
    "relu in place": (lambda x, a, b: F.relu_(a(x)).chunk(2, -1)[0].exp() + b(x), partial(linear, 128), linear),
    "one input, many readers": (lambda x, a, b: a(h := x.sin()) * b(h) * h.exp(), linear, linear),
    "dropout": (lambda x, a: F.dropout(a(x).relu(), 0.5).view(-1, 32).sin(), linear),
    "frozen": (lambda x, a, b: F.relu(b(F.relu(a(x.mT)))).chunk(2, 1)[0].exp(), conv, frozen),
    "frozen relu read twice": (lambda x, a, b: (h := F.relu(b(a(x.mT)))) * h.exp(), conv, frozen),
    "GRU": (lambda x, a: a(x)[0], partial(nn.GRU, 64, 64, batch_first=True)),
    "encoder": (lambda x, a: a(x), partial(nn.TransformerEncoderLayer, 64, 4, 128, dropout=0.0, batch_first=True)),
    "decoder": (lambda x, a: a(x, x.flip(1)), partial(nn.TransformerDecoderLayer, 64, 4, 128, batch_first=True)),
    "embedding": (
        lambda x, a: torch.stack([h.exp() for h in a((9 * x[..., 0]).abs().long()).split(16, -1)]),
        partial(nn.Embedding, 100, 256),
    ),
    "batch norm": (lambda x, a: a(x.mT), normed),
    "shuffled channels": (
        lambda x, a, b: b(F.channel_shuffle(F.silu(a(x.mT)), 4).flip(1)[:, ::2]), conv, partial(conv, 32, 8, 1)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("name", VIEWING)
def test_bytes_equal_bytes_held_by_allocator(name: str, budget: float | None) -> None:
    torch.manual_seed(0)
    function, *layers = VIEWING[name]
    model, x = Scalar(function, *(build() for build in layers)), torch.randn(8, 64, 64)
    report = zoo.memory_report(model, x, budget=budget)
    measured = [measure_memory(lambda: model(x), model.parameters()).held]
    lean(model, budget)
    model(x).backward()  # later steps follow the plan for the budget
    model.zero_grad()
    measured.append(measure_memory(lambda: model(x), model.parameters()).held)
    assert [report.plain, report.lean] == pytest.approx(measured, rel=0.02, abs=0.002 * report.plain)


class Cumulative(nn.Identity):
    """An operation that is not recomputed: it saves its input and its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.logcumsumexp(1)


class Part(nn.Module):
    """A block of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.relu(self.norm(x)))


def test_printed_report_is_short_and_names_the_largest_holders() -> None:
    parts = {f"a_part_of_the_network_with_quite_a_long_name_{index}": Part() for index in range(8)}
    layers = {"stem": nn.Conv2d(3, 16, 3, padding=1), "parts": nn.Sequential(OrderedDict(parts)), "last": Cumulative()}
    report = zoo.memory_report(nn.Sequential(OrderedDict(layers)), images(64))
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 130
    assert f"{report.lean / 1e6:.2f} MB" in lines[0]
    assert f"({100 * report.lean / report.plain:.0f} %)" in lines[0]
    table = [line for line in lines if line.startswith("|")]
    most = max(report.modules, key=lambda module: module.plain)
    assert len(table) == 2 + 5 + 1
    cells = most.kind, f"{most.plain / 1e6:.2f}", f"{100 * most.plain / report.plain:.2f}"
    assert all(text in table[2] for text in (most.name[-20:], *(f" {cell} " for cell in cells)))
    assert "aten.logcumsumexp 0.52 (not an operation that can be recomputed)" in report.table()
    peaks = {"lean": report.peak, "checkpoints": report.with_checkpoints}
    peaks[f"budget {report.with_budget.budget}"] = report.with_budget.peak
    texts = [f"{name} {peak / 1e6:.3g} MB ({100 * peak / report.plain_peak:.0f} %)" for name, peak in peaks.items()]
    assert lines[1] == f"peak of a training step: plain {report.plain_peak / 1e6:.3g} MB, {', '.join(texts)}"
    assert "table()" in lines[-1]
    assert "meta" not in lines[-1]


def test_report_measures_helpful_budget() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, kernel, padding="same") for kernel in (1, 1, 1, 7)))
    model.requires_grad_(True)
    report = zoo.memory_report(model, torch.randn(2, 8, 64, 64))
    budget, held, peak = report.with_budget
    assert held < report.lean
    within = zoo.memory_report(model, torch.randn(2, 8, 64, 64), budget=budget)
    assert (held, peak) == (within.lean, within.peak)
    assert f"budget {budget} {peak / 1e6:.3g} MB" in str(report)
    assert within.with_budget is None


def test_fraction_is_met_in_report() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(8)))
    report = zoo.memory_report(model, torch.randn(2, 8, 64, 64), budget=0.6)
    assert 0.4 * report.plain < report.lean <= 0.6 * report.plain


def test_reported_peaks_equal_measured_peaks_of_training_steps() -> None:
    x = images(64)
    stem, *body, pool, flatten, head = network(blocks=6, channels=16).children()
    assert all(isinstance(each, Block) for each in body)
    blocks = nn.Sequential(stem, nn.Sequential(*body), pool, flatten, head)
    report = zoo.memory_report(blocks, x)
    checkpointed = nn.Sequential(stem, *map(Checkpointed, body), pool, flatten, head)
    assert report.plain_peak == pytest.approx(peak(blocks, x), rel=0.15)  # the measured peak includes scratch memory
    assert report.with_checkpoints == pytest.approx(peak(checkpointed, x), rel=0.15)
    assert report.peak == pytest.approx(peak(lean(blocks), x), rel=0.15)
    of_lean = zoo.memory_report(blocks, x)  # the network is lean now
    assert (of_lean.plain_peak, of_lean.peak) == (report.plain_peak, report.peak)


def norm_between_convolutions(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the meta device counts for the GPU")
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (network(blocks=2, channels=16), torch.float32),  # norms are fused with shortcuts and ReLUs
        (network(blocks=2, channels=16).to(memory_format=torch.channels_last), torch.float64),
        (norm_between_convolutions(nn.BatchNorm2d(8, affine=False)), torch.float32),
        (norm_between_convolutions(nn.BatchNorm2d(8).eval()), torch.float32),
        (norm_between_convolutions(nn.BatchNorm2d(8)), torch.bfloat16),  # its norms are not fused
    ],
    ids=["residual", "channels last", "without weights", "evaluation", "half precision"],
)
def test_report_on_meta_device_equals_cpus(model: nn.Module, dtype: torch.dtype) -> None:
    model, x = model.to(dtype), images(64).to(dtype)
    real, counted = zoo.memory_report(model, x), zoo.memory_report(copy.deepcopy(model).to("meta"), x.to("meta"))
    assert str(counted).endswith("; on the meta device, attention is counted as on the CPU")
    assert (counted.with_budget and counted.with_budget.budget) == (real.with_budget and real.with_budget.budget)
    for name in ("plain", "lean", "plain_peak", "peak"):  # torch's statistics differ by some bytes
        assert getattr(counted, name) == pytest.approx(getattr(real, name), rel=0.001), name


class OutOfMemory(nn.Conv2d):
    """Raises an out-of-memory error in plain training."""

    def forward(self, x: Tensor) -> Tensor:
        if top_saved_tensors_hooks(True) is None:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x).exp()


class Hiding(nn.Conv2d):
    def forward(self, x: Tensor) -> list[int]:
        return [super().forward(x).exp().numel()]


@pytest.mark.parametrize(
    ("kind", "budget", "plain_peak", "text"),
    [
        (OutOfMemory, None, float("inf"), "plain out of memory, lean {:.3g} MB"),
        (OutOfMemory, "1GB", None, "lean {:.3g} MB\n"),
        (Hiding, None, None, "not measured, as no output requires gradients"),
    ],
)
def test_unmeasured_peaks_are_named(kind: Any, budget: str | None, plain_peak: float | None, text: str) -> None:
    report = zoo.memory_report(kind(3, 8, 3), images(64), budget=budget)
    assert report.plain_peak == plain_peak
    assert (report.peak is None) == (kind is Hiding)
    assert f"peak of a training step: {text.format((report.peak or 0) / 1e6)}" in str(report)


class WithLoss(nn.Linear):
    """Called like networks of transformers, with named inputs and labels."""

    def __init__(self) -> None:
        super().__init__(64, 32)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, budget: float = 1.0) -> dict[str, Tensor]:
        scores = super().forward(pixel_values).exp() * budget
        loss = {} if labels is None else {"loss": F.cross_entropy(scores, labels)}
        return {**loss, "scores": scores}


class OfDict(nn.Linear):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["x"]).exp()


class OfLists(nn.Conv2d):
    """Called like torchvision's detectors, with lists of images and targets."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        maps = [super(OfLists, self).forward(image[None]).sigmoid() for image in images]
        return sum((each * target["boxes"]).sum() for each, target in zip(maps, targets, strict=True))


ROWS, SCORES_BYTES = torch.randn(128, 64), 4 * 128 * 32


@pytest.mark.parametrize(
    ("model", "inputs", "named_inputs", "plain"),
    [
        (WithLoss(), (ROWS,), {}, SCORES_BYTES),
        (WithLoss(), (ROWS, None, 0.5), {}, SCORES_BYTES),
        (WithLoss(), (), {"pixel_values": ROWS}, SCORES_BYTES),
        (WithLoss(), (), {"pixel_values": ROWS, "labels": torch.zeros(128, dtype=torch.long)},
         pytest.approx(2 * SCORES_BYTES, rel=0.01)),  # and the logarithm of the softmax
        (OfDict(64, 32), ({"x": ROWS},), {}, SCORES_BYTES),
        (OfLists(3, 8, 3), ([torch.randn(3, 66, 66)] * 2, [{"boxes": torch.randn(64, 64)}] * 2), {}, 2 * 4 * 8 * 64**2),
    ],
    ids=["by position", "options", "by name", "with loss", "dict", "lists"],
)  # fmt: skip
def test_inputs_reach_the_network_and_are_not_counted(
    model: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any], plain: Any
) -> None:
    assert zoo.memory_report(model, *inputs, **named_inputs).plain == plain


def test_error_of_network_for_dict_is_raised() -> None:
    with pytest.raises(KeyError):
        zoo.memory_report(OfDict(64, 32), {"y": ROWS})


class Batch:
    """Images in an object."""

    def __init__(self, images: Tensor) -> None:
        self.tensors = {"images": images}


@pytest.mark.parametrize("pack", [Batch, lambda x: [Batch(x)], lambda x: {"first": (Batch(x),)}])
def test_inputs_in_objects_are_copied_and_not_counted(pack: Callable[[Tensor], Any]) -> None:
    class Overwriting(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            while not isinstance(batch, (Batch, Tensor)):
                batch = batch["first"] if isinstance(batch, dict) else batch[0]
            return super().forward((batch.tensors["images"] if isinstance(batch, Batch) else batch).mul_(2)).exp()

    model, x = Overwriting(64, 64), torch.ones(128, 64)
    report = zoo.memory_report(model, pack(x))
    assert bool((x == 1).all())
    assert report.plain == 4 * 128 * 64
    assert report.plain_peak == zoo.memory_report(model, x).plain_peak
    assert report.largest_batch("1MB") > 128


@pytest.mark.parametrize("given", ["resnet18", nn.Conv2d, [nn.ReLU()], None])
def test_non_module_raises_with_type(given: object) -> None:
    message = refused(TypeError, lambda: zoo.memory_report(given, torch.zeros(1)), "torch.nn.Module", repr(given)[:20])
    assert ("zoo.get" in message) == (given == "resnet18")


def test_report_of_network_without_saved_tensors_is_named() -> None:
    report = zoo.memory_report(nn.ReLU(), torch.randn(2, 2))
    assert report.plain == 0
    assert "nothing" in str(report)


class Replacing(nn.Module):
    """Replaces its buffer in each forward pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean
        return x * self.mean


@pytest.mark.parametrize("budget", [None, 0.5, "1GB"])
def test_nothing_is_changed(budget: float | str | None) -> None:
    model = lean(nn.Sequential(nn.ReLU(inplace=True), network(), nn.Dropout(0.5), Replacing()))
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    example = images()
    state = torch.get_rng_state()
    zoo.memory_report(model, example, budget=budget)
    assert torch.equal(example, images())
    assert [each.grad is None for each in model.parameters()] == [False, *[True] * (len(list(model.parameters())) - 1)]
    assert bool((next(model.parameters()).grad == 1).all())
    assert is_lean(model)
    assert all("forward" not in vars(each) for each in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
