"""Resized images against the installed PIL, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.refusals import refused
from zoo.config.limits import MAX_PIXELS
from zoo.errors import DataError
from zoo.ops import native
from zoo.ops.resample import resize_image

compiled = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"compiled kernels: {native.unavailable_reason()}"
)
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 70), st.integers(1, 700))


def resized_by_pil(image: Tensor, size: tuple[int, int]) -> Tensor:
    source = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
    return torch.from_numpy(np.array(source.resize(size[::-1], Image.Resampling.BILINEAR))).permute(2, 0, 1)


def make_image(height: int, width: int, seed: int = 0, extreme: bool = False) -> Tensor:
    """Return noise with interleaved pixels, of all values or, where it is extreme, of 0 and 255."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if extreme else 256, (height, width, 3), generator=generator) * (255 if extreme else 1)
    return values.to(torch.uint8).permute(2, 0, 1)


@st.composite
def cases(draw):
    """Return an image, a size, and a window."""
    image = make_image(draw(SIDES), draw(SIDES), draw(st.integers(0, 99)), draw(st.booleans()))
    size = draw(SIDES), draw(SIDES)
    first_row, first_column = draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))
    rows, columns = draw(st.integers(1, size[0] - first_row)), draw(st.integers(1, size[1] - first_column))
    return image, size, (first_row, first_column, rows, columns)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_images_and_windows_equal_pil(case):
    image, size, window = case
    expected = resized_by_pil(image, size)
    result = resize_image(image, size)
    assert result.is_contiguous()
    assert torch.equal(result, expected)
    first_row, first_column, rows, columns = window
    expected = expected[:, first_row : first_row + rows, first_column : first_column + columns]
    assert torch.equal(resize_image(image, size, window), expected)


def interleaved(image: Tensor) -> Tensor:
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)


LAYOUTS = {
    "planar": lambda image: image.contiguous(),
    "crop": lambda image: interleaved(torch.nn.functional.pad(image, (5, 3, 2, 1)))[:, 2:-1, 5:-3],
    "with alpha": lambda image: interleaved(torch.cat([image, image[:1]]))[:3],
    "column by column": lambda image: image.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every other row": lambda image: interleaved(image.repeat_interleave(2, 1))[:, ::2],
    "every other column": lambda image: interleaved(image.repeat_interleave(2, 2))[:, :, ::2],
    "one value": lambda image: image[:1, :1, :1].expand_as(image),
    "one row": lambda image: image[:, :1].expand_as(image),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [(45, 61), (1, 61), (45, 1)])
def test_layout_of_image_does_not_matter(layout, source):
    image = LAYOUTS[layout](make_image(*source))
    assert image.shape == (3, *source)
    assert torch.equal(resize_image(image, (32, 40)), resized_by_pil(image, (32, 40)))


@compiled
@pytest.mark.parametrize("source", [(40, 50), (300, 40), (9, 2)])
def test_result_is_the_same_without_kernels(source, monkeypatch):
    image, arguments = make_image(*source), ((31, 20), (4, 5, 20, 13))
    native_result = resize_image(image, *arguments)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "not built")
    assert torch.equal(resize_image(image, *arguments), native_result)


@compiled
def test_opcheck_accepts_operator():
    out = torch.empty(3, 8, 9, dtype=torch.uint8)
    arguments = (out, make_image(20, 30), 10, 12, 0.0, 0.5, 29.5, 20.0, 1, 2, False)
    torch.library.opcheck(torch.ops.zoo.resize_into.default, arguments, test_utils=("test_schema", "test_faketensor"))


@compiled
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("uint8", {0: torch.empty(3, 8, 9)}),
        ("not empty", {0: torch.empty(3, 0, 9, dtype=torch.uint8)}),
        ("without gaps", {0: torch.empty(3, 8, 18, dtype=torch.uint8)[:, :, ::2]}),
        ("interleaved", {1: make_image(20, 30).contiguous()}),
        ("resized", {8: 3}),
        ("image", {6: 30.5}),
        ("image", {5: float("nan")}),
    ],
)
def test_out_of_bounds_memory_raises(name, changed):
    arguments = [torch.empty(3, 8, 9, dtype=torch.uint8), make_image(20, 30), 10, 12, 0.0, 0.5, 29.5, 20.0, 1, 2, False]
    for place, value in changed.items():
        arguments[place] = value
    refused(RuntimeError, lambda: torch.ops.zoo.resize_into.default(*arguments), name)


@pytest.mark.parametrize(
    ("image", "size", "name"),
    [
        (torch.zeros(3, 0, 5, dtype=torch.uint8), (8, 8), "5 x 0 px"),
        (make_image(20, 10), (1, MAX_PIXELS + 1), "smaller size"),
        (torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, 1, MAX_PIXELS + 1), (8, 8), "remove the image"),
    ],
)
def test_empty_and_huge_images_raise(image, size, name):
    refused(DataError, lambda: resize_image(image, size), name)
