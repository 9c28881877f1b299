"""Test-time augmentation equals a plain and slow reference, on whole maps and pixel by pixel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.refusals import refused
from zoo.errors import ConfigError, DataError, WeightsError
from zoo.tasks import tta as module
from zoo.tasks.protocols import Fusion
from zoo.tasks.tta import check_views, segment_image

CLASSES = 5
FUSIONS = get_args(Fusion)


def _network(stride: int = 4, num_classes: int = CLASSES, context: int = 1) -> nn.Module:
    """A network whose map is ``stride`` times smaller; each cell sees ``context`` cells around itself."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, stride, stride),
        nn.Tanh(),
        nn.Conv2d(8, num_classes, 2 * context + 1, padding=context),
    ).double()


def _image(height: int = 20, width: int = 28) -> Tensor:
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _plain_probabilities(
    forward: Callable[[Tensor], Tensor], image: Tensor, scales: tuple[float, ...], flip: bool, size: tuple[int, int]
) -> Iterator[Tensor]:
    """Yield the probabilities (C, H, W) of each view, from whole maps."""
    sides = image.shape[1:]
    for scale in scales:
        scaled = [round(side * scale) for side in sides]
        for flipped in [False, True] if flip else [False]:
            x = F.interpolate(image[None], size=scaled, mode="bilinear", align_corners=False)
            logits = forward(torch.flip(x, [3]) if flipped else x)
            logits = torch.flip(logits, [3]) if flipped else logits
            yield F.interpolate(logits, size=size, mode="bilinear", align_corners=False).softmax(1)[0]


def _plain_fusion(views: list[list[float]], fusion: Fusion) -> tuple[int, float]:
    """Return the class and probability of one pixel, given the probabilities of all classes in each view."""
    if fusion == "mean":
        means = [sum(of_class) / len(views) for of_class in zip(*views, strict=True)]
        return means.index(max(means)), max(means)
    winners = [(view.index(max(view)), max(view)) for view in views]
    if fusion == "max":
        return max(winners, key=lambda winner: winner[1])  # the first of equal ones
    votes = Counter(k for k, _ in winners)
    sums = {k: sum(p for winner, p in winners if winner == k) for k in votes}
    best = min(votes, key=lambda k: (-votes[k], -sums[k], k))
    return best, sums[best] / votes[best]


def _check(
    forward: Callable[[Tensor], Tensor],
    image: Tensor,
    scales: tuple[float, ...],
    flip: bool,
    size: tuple[int, int],
    fusion: Fusion,
) -> None:
    with torch.no_grad():
        plain = [view.tolist() for view in _plain_probabilities(forward, image, scales, flip, size)]
        found = segment_image(forward, image, scales, flip, size, fusion)
    assert found.classes.shape == found.probabilities.shape == size
    for row, column in itertools.product(*map(range, size)):
        pixel = [[of_class[row][column] for of_class in view] for view in plain]
        expected, probability = _plain_fusion(pixel, fusion)
        assert int(found.classes[row, column]) == expected
        assert float(found.probabilities[row, column]) == pytest.approx(probability, abs=1e-6)


@pytest.mark.parametrize(
    ("scales", "flip", "size"),
    [
        ((1.0,), False, (20, 28)),
        ((0.7, 1.0, 1.2), True, (20, 28)),
        ((0.5, 1.0), True, (31, 17)),
        ((2.0,), True, (9, 9)),
    ],
)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_fused_views_equal_whole_maps(
    fusion: Fusion, scales: tuple[float, ...], flip: bool, size: tuple[int, int]
) -> None:
    _check(_network(), _image(), scales, flip, size, fusion)


@pytest.mark.parametrize("fusion", ["max", "voting"])
def test_ties_go_to_higher_sum_then_smaller_class(fusion: Fusion) -> None:
    """The logits are few whole numbers that every view draws anew, so that equal votes and probabilities are common."""
    generator = torch.Generator().manual_seed(3)
    drawn: list[Tensor] = []
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        if len(drawn) < 6:
            drawn.append(torch.randint(0, 3, (1, 4, 12, 12), generator=generator).double())
        calls.append(len(calls))
        return drawn[calls[-1] % 6]

    _check(forward, _image(12, 12), (1.0, 0.9, 0.8), True, (12, 12), fusion)
    largest = torch.stack(drawn).softmax(2).amax(2)
    assert (largest[0] == largest[1]).any()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_strips_of_any_height_are_bit_identical(monkeypatch: pytest.MonkeyPatch, fusion: Fusion) -> None:
    whole = segment_image(_network(), _image(), (0.7, 1.0), True, (40, 40), fusion)
    monkeypatch.setattr(module, "STRIP_BYTES", 1)
    rows = segment_image(_network(), _image(), (0.7, 1.0), True, (40, 40), fusion)
    assert torch.equal(whole.classes, rows.classes)
    assert torch.equal(whole.probabilities, rows.probabilities)


class _LargestTensor(TorchDispatchMode):
    """Notes the number of values of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("fusion", FUSIONS)
def test_no_map_of_all_classes_exists_at_size_of_image(monkeypatch: pytest.MonkeyPatch, fusion: Fusion) -> None:
    monkeypatch.setattr(module, "STRIP_BYTES", 2**16)
    network = _network(stride=8, num_classes=50)
    with _LargestTensor() as largest:
        segment_image(network, _image(128, 128), (1.0, 1.5), True, fusion=fusion)
    assert largest.numel < 50 * 128 * 128 / 4


@pytest.mark.parametrize("scales", [(), (0.0,), (float("nan"),), (float("inf"),)])
def test_impossible_scales_raise(scales: tuple[float, ...]) -> None:
    refused(ConfigError, lambda: check_views(scales), "scales = ")


def test_unusable_fusion_image_and_logits_raise() -> None:
    refused(ConfigError, lambda: check_views((1.0,), "median"), "fusion = 'median'", "mean, voting, max")
    large = partial(segment_image, _network(), _image(100, 100), (100.0,))
    refused(DataError, large, "100 x 100 px", "scale 100", "10000 x 10000 px")
    bad = partial(segment_image, lambda x: torch.full((1, 2, 4, 4), float("nan")), _image())
    refused(WeightsError, bad, "not finite")
