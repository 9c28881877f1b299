"""Test-time augmentation equals a plain and slow reference, on whole maps and pixel by pixel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.errors import ConfigError, DataError, WeightsError
from zoo.tasks import tta as module
from zoo.tasks.tta import check_scales, segment

CLASSES = 5


def _network(stride: int = 4, classes: int = CLASSES, context: int = 1) -> nn.Module:
    """A network whose map is ``stride`` times smaller; each cell sees ``context`` cells around itself."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, stride, stride),
        nn.Tanh(),
        nn.Conv2d(8, classes, 2 * context + 1, padding=context),
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


@pytest.mark.parametrize(
    ("scales", "flip", "size"),
    [
        ((1.0,), False, (20, 28)),
        ((0.7, 1.0, 1.2), True, (20, 28)),
        ((0.5, 1.0), True, (31, 17)),
        ((2.0,), True, (9, 9)),
    ],
)
def test_averaged_views_are_those_of_whole_maps(scales: tuple[float, ...], flip: bool, size: tuple[int, int]) -> None:
    forward, image = _network(), _image()
    with torch.no_grad():
        plain = [view.tolist() for view in _plain_probabilities(forward, image, scales, flip, size)]
        found = segment(forward, image, scales, flip, size)
    assert found.classes.shape == found.probabilities.shape == size
    for row, column in itertools.product(*map(range, size)):
        pixel = [[of_class[row][column] for of_class in view] for view in plain]
        means = [sum(of_class) / len(pixel) for of_class in zip(*pixel, strict=True)]
        assert int(found.classes[row, column]) == means.index(max(means))
        assert float(found.probabilities[row, column]) == pytest.approx(max(means), abs=1e-6)


def test_strips_of_any_height_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = segment(_network(), _image(), (0.7, 1.0), True, (40, 40))
    monkeypatch.setattr(module, "STRIP_BYTES", 1)
    rows = segment(_network(), _image(), (0.7, 1.0), True, (40, 40))
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


def test_no_map_of_all_classes_exists_at_the_size_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIP_BYTES", 2**16)
    network = _network(stride=8, classes=50)
    with _LargestTensor() as largest:
        segment(network, _image(128, 128), (1.0, 1.5), True)
    assert largest.numel < 50 * 128 * 128 / 4


@pytest.mark.parametrize("scales", [(), (0.0,), (float("nan"),), (float("inf"),)])
def test_impossible_scales_are_refused(scales: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="one or more numbers above 0"):
        check_scales(scales)


def test_a_scale_that_would_fill_the_memory_is_the_fault_of_the_image() -> None:
    with pytest.raises(DataError, match="100 x 100 px at scale 100 has 10000 x 10000 px"):
        segment(_network(), _image(100, 100), (100.0,))


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(WeightsError, match="logits are not finite"):
        segment(lambda x: torch.full((1, 2, 4, 4), float("nan")), _image())
