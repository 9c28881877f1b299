"""Bilinear resizing of 8-bit images, bit-identical with PIL and several times faster.

The published networks were trained and scored on images that PIL resized. torch's resampling of 8-bit tensors rounds
the weights more coarsely, so some values differ by 1.
"""

from __future__ import annotations

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from zoo.errors import DataError
from zoo.ops.abn import native
from zoo.spec.limits import MAX_PIXELS

# Values are rounded between the horizontal and the vertical pass, so their order matters. Since version 13 PIL starts
# with the vertical pass where the height shrinks by more than twice as many pixels as the width.
_PIL_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13


def resize_box(
    image: Tensor,
    size: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
    window: tuple[int, int, int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``image`` resized, bit-identical with PIL's ``image.resize(..., BILINEAR, box)``.

    - `image`: uint8 (3, H, W) on the CPU. Images with interleaved pixels, such as images of
      `torchvision.io.decode_jpeg` and views ``image[:, top:bottom, left:right]`` of them, are read without a copy.
    - `size`: height and width of the resized image.
    - `box`: left, top, right and bottom of the part of ``image`` to resize, in pixels, which may be fractions; the
      whole image by default. Pixels around the box contribute to its edges. To crop before resizing, as
      `torchvision.transforms.RandomResizedCrop` does, pass a view instead.
    - `window`: top, left, height and width of the part of the resized image to compute and return, for example its
      center.
    - `out`: uint8 tensor of the result's shape, with contiguous rows; overwritten and returned.

    The result is contiguous unless ``out`` is given. PIL is called if the compiled kernels are not available. Raises
    DataError for an image without pixels, or with more than `MAX_PIXELS` before or after resizing; ValueError for other
    arguments out of range.
    """
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3 or not image.is_cpu:
        raise ValueError(
            f"resize_box got a tensor of {image.dtype} and shape {tuple(image.shape)} on {image.device}; pass a uint8 "
            f"image (3, H, W) on the CPU"
        )
    image_height, image_width = image.shape[1:]
    height, width = size
    if min(size) < 1:
        raise ValueError(f"resize_box got a size of {height} x {width}; pass a height and a width of at least 1 px")
    if image.numel() == 0 or max(image_height * image_width, height * width) > MAX_PIXELS:
        raise DataError(
            f"cannot resize an image of {image_width} x {image_height} px to {width} x {height} px: images must have "
            f"1 to {MAX_PIXELS:,} px; use a smaller size, or remove the image"
        )
    left, top, right, bottom = (0, 0, image_width, image_height) if box is None else box
    if not (0 <= left < right <= image_width and 0 <= top < bottom <= image_height):
        raise ValueError(
            f"resize_box got a box (left, top, right, bottom) of {box} for an image of {image_width} x {image_height} "
            f"px; pass one that is not empty and lies within the image"
        )
    first_row, first_column, rows, columns = (0, 0, height, width) if window is None else window
    end_row, end_column = first_row + rows, first_column + columns
    if not (0 <= first_row < end_row <= height and 0 <= first_column < end_column <= width):
        raise ValueError(
            f"resize_box got a window (top, left, height, width) of {window} for a result of {width} x {height} px; "
            f"pass one that is not empty and lies within the result"
        )
    if out is None:
        out = torch.empty(3, rows, columns, dtype=torch.uint8)
    elif out.shape != (3, rows, columns) or out.dtype != torch.uint8 or out.stride(2) != 1:
        raise ValueError(
            f"resize_box got an out of {out.dtype}, shape {tuple(out.shape)} and strides {out.stride()}; pass a "
            f"contiguous uint8 tensor of shape {(3, rows, columns)}"
        )
    if native.unavailable_reason() is not None:
        return out.copy_(_resize_by_pil(image, size, box)[:, first_row:end_row, first_column:end_column])
    if image.stride(0) != 1 or image.stride(2) != 3:
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    vertical_first = _PIL_CHOOSES_ORDER and image_height - height > max(0, 2 * (image_width - width))
    native.resize_into(out, image, size, (left, top, right, bottom), (first_row, first_column), vertical_first)
    return out


def _resize_by_pil(image: Tensor, size: tuple[int, int], box: tuple[float, float, float, float] | None) -> Tensor:
    source = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = source.resize((size[1], size[0]), Image.Resampling.BILINEAR, box)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
