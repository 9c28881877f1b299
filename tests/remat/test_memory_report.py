"""The report of a network's memory adds up to what its modules hold, and changes nothing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.remat.programs import images, network
from zoo.remat.lean import lean


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of the distinct tensors that autograd keeps for the loss of a model."""
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


def test_the_sums_are_the_bytes_that_autograd_holds() -> None:
    model = network(channels=16)
    report = zoo.memory_report(model, images(64))
    assert report.plain == held_bytes(model) - images(64).nbytes
    assert 0 < report.lean < 0.7 * report.plain
    by_name = {module.name: module for module in report.modules}
    reason = "not an operation that can be recomputed"
    assert by_name["1.norms.0"].kept == {
        ("aten.convolution", reason): 4 * 2 * 16 * 64**2,
        ("aten.native_batch_norm", reason): 4 * 2 * 16,  # mean and inverse deviation
    }
    assert by_name["1.relu"].lean == 0
    assert set(by_name["1.relu"].repeated) == {"aten.relu_"}
    table = report.table().splitlines()
    assert len(table) == 2 + len(report.modules) + 1
    assert table[-1].split("|")[1].strip() == "all"


class Cumulative(nn.Module):
    """An operation that is not repeated: it keeps its input and its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.logcumsumexp(1)


def test_the_printed_report_is_short_and_names_what_holds_most() -> None:
    parts: dict[str, nn.Module] = {"stem": nn.Conv2d(3, 16, 3, padding=1)}
    for index in range(30):
        name = f"a_part_of_the_network_with_quite_a_long_name_{index}"
        parts[name] = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    parts["cumulative"] = Cumulative()
    report = zoo.memory_report(nn.Sequential(OrderedDict(parts)), images(64))
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 130
    assert f"{report.lean / 1e6:.2f} MB" in lines[0]
    assert f"({100 * report.lean / report.plain:.0f} %)" in lines[0]
    table = [line for line in lines if line.startswith("|")]
    most = max(report.modules, key=lambda module: module.plain)
    assert len(table) == 2 + 5 + 1
    assert most.name[-20:] in table[2]
    assert f" {most.kind} " in table[2]
    assert f" {most.plain / 1e6:.2f} " in table[2]
    assert f" {100 * most.plain / report.plain:.2f} " in table[2]
    assert "aten.logcumsumexp" in report.table()
    advice = lines[-2]
    assert f"lean {(report.plain - report.lean) / 1e6:.3g} MB" in advice
    assert report.with_inplace_norms is not None
    assert report.with_checkpoints is not None
    map_bytes = 4 * 2 * 16 * 64**2
    assert report.plain - report.with_inplace_norms == pytest.approx(30 * map_bytes, rel=0.01)
    assert report.with_checkpoints == 30 * map_bytes + 2 * map_bytes  # logcumsumexp holds its input and its output
    assert f"checkpoints {(report.plain - report.with_checkpoints) / 1e6:.3g} MB" in advice
    assert "in-place norms" in advice
    assert "budget" in advice
    assert "table()" in lines[-1]


def test_the_report_measures_a_budget_that_helps() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, kernel, padding="same") for kernel in (1, 1, 1, 7)))
    model.requires_grad_(True)
    report = zoo.memory_report(model, torch.randn(2, 8, 64, 64))
    assert report.with_budget is not None
    budget, held = report.with_budget
    assert held < report.lean
    assert held == zoo.memory_report(model, torch.randn(2, 8, 64, 64), budget=budget).lean
    assert f'budget "{budget}"' in str(report)


def test_a_fraction_is_met_in_the_report() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(8)))
    report = zoo.memory_report(model, torch.randn(2, 8, 64, 64), budget=0.6)
    assert 0.4 * report.plain < report.lean <= 0.6 * report.plain


class Detector(nn.Module):
    """A network that takes what torchvision's detectors do: a list of images and a list of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        losses = [
            self.conv(image[None]).sigmoid() * target["boxes"] for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack([loss.sum() for loss in losses]).sum()


def test_all_inputs_are_passed_to_the_network_and_not_counted() -> None:
    images = [torch.randn(3, 66, 66) for _ in range(2)]
    targets = [{"boxes": torch.randn(64, 64)} for _ in range(2)]
    report = zoo.memory_report(Detector(), images, targets)
    assert report.plain == 2 * 4 * 8 * 64**2


@pytest.mark.parametrize("given", ["resnet18", nn.Conv2d, [nn.ReLU()], None])
def test_what_is_no_network_is_named(given: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module") as error:
        zoo.memory_report(given, torch.zeros(1))  # type: ignore[arg-type]
    assert repr(given)[:20] in str(error.value)
    assert ("zoo.get" in str(error.value)) == (given == "resnet18")


def test_a_network_that_holds_nothing_says_so() -> None:
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


def test_nothing_is_changed() -> None:
    model = lean(nn.Sequential(network(), nn.Dropout(0.5), Replacing()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    example = images()
    state = torch.get_rng_state()
    zoo.memory_report(model, example)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
