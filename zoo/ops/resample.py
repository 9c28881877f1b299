"""Resizing 8-bit images with the bits of PIL's bilinear resampling, several times faster than PIL.

The published networks were trained and scored on images that PIL had resized. torch's own resampling of 8-bit tensors
rounds the weights of pixels more coarsely, so that some of its values differ by 1.
"""

from __future__ import annotations

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from zoo.errors import DataError
from zoo.limits import MAX_PIXELS
from zoo.ops.abn import native

# Values are rounded between the horizontal and the vertical pass, so that their order matters. From version 13 on PIL
# starts with the vertical pass where the height shrinks by more than twice as many pixels as the width.
_PIL_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13


def resize_box(
    image: Tensor,
    size: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
    window: tuple[int, int, int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``image`` resized as PIL's ``image.resize(..., BILINEAR, box)`` does it, bit for bit.

    - `image`: uint8 (3, H, W) on the CPU. It is read where it lies if the three values of a pixel lie side by side, as
      in what `torchvision.io.decode_jpeg` returns, and in a view ``image[:, top:bottom, left:right]`` of that. Other
      images are copied first.
    - `size`: height and width of the resized image.
    - `box`: left, top, right and bottom of the part of ``image`` that is resized, in pixels and their fractions; the
      whole image without it. The pixels around the box blend into its edges. To crop an image before it is resized, as
      `torchvision.transforms.RandomResizedCrop` does, give a view instead.
    - `window`: top, left, height and width of the part of the resized image that is returned, for example its centre.
      Only this part is computed.
    - `out`: uint8 of the shape of the result, with rows without gaps; is overwritten and returned.

    The result is contiguous unless it is ``out``. Without the compiled kernels PIL itself is called. Raises DataError
    for an image that has no pixels, or more than `MAX_PIXELS` before or after; ValueError for other arguments that are
    out of range.
    """
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3 or not image.is_cpu:
        raise ValueError(
            f"a tensor of {image.dtype} and shape {tuple(image.shape)} on {image.device}; resize_box: give a uint8 "
            f"image (3, H, W) on the CPU"
        )
    image_height, image_width = image.shape[1:]
    height, width = size
    if min(size) < 1:
        raise ValueError(f"a size of {height} x {width}; resize_box: give a height and a width of 1 px or more")
    if image.numel() == 0 or max(image_height * image_width, height * width) > MAX_PIXELS:
        raise DataError(
            f"an image of {image_width} x {image_height} px cannot be resized to {width} x {height} px: images have "
            f"1 to {MAX_PIXELS:,} px; use a smaller size, or leave the image out"
        )
    left, top, right, bottom = (0, 0, image_width, image_height) if box is None else box
    if not (0 <= left < right <= image_width and 0 <= top < bottom <= image_height):
        raise ValueError(
            f"a box (left, top, right, bottom) of {box} in an image of {image_width} x {image_height} px; resize_box: "
            f"give one that is not empty and lies within the image"
        )
    first_row, first_column, rows, columns = (0, 0, height, width) if window is None else window
    end_row, end_column = first_row + rows, first_column + columns
    if not (0 <= first_row < end_row <= height and 0 <= first_column < end_column <= width):
        raise ValueError(
            f"a window (top, left, height, width) of {window} in a result of {width} x {height} px; resize_box: give "
            f"one that is not empty and lies within the result"
        )
    if out is None:
        out = torch.empty(3, rows, columns, dtype=torch.uint8)
    elif out.shape != (3, rows, columns) or out.dtype != torch.uint8 or out.stride(2) != 1:
        raise ValueError(
            f"a result of {out.dtype}, shape {tuple(out.shape)} and strides {out.stride()}; resize_box: give a "
            f"contiguous uint8 tensor {(3, rows, columns)}"
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
