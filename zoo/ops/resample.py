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

from zoo.config.limits import MAX_PIXELS
from zoo.errors import DataError
from zoo.ops import native

# Values are rounded between the two passes, so their order matters. Since version 13, PIL starts with the vertical pass
# if the height shrinks by more than twice as many pixels as the width.
_PIL_CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13


def resize_image(image: Tensor, size: tuple[int, int], window: tuple[int, int, int, int] | None = None) -> Tensor:
    """Resize ``image``, bit-identical to PIL's ``image.resize(..., BILINEAR)``; return it in contiguous memory.

    - `image`: uint8 (3, H, W) on the CPU. Images with interleaved pixels, such as images of
      `torchvision.io.decode_jpeg` and views ``image[:, top:bottom, left:right]`` of them, are read without a copy.
    - `size`: height and width of the resized image.
    - `window`: top, left, height and width of the part of the resized image to compute and return, for example its
      center.

    Calls PIL if the compiled kernels are not available. Raises DataError for an image without pixels, or with more than
    `MAX_PIXELS` before or after resizing. Raises RuntimeError for a window outside the resized image.
    """
    (image_height, image_width), (height, width) = image.shape[1:], size
    if image.numel() == 0 or max(image_height * image_width, height * width) > MAX_PIXELS:
        raise DataError(
            f"cannot resize an image of {image_width} x {image_height} px to {width} x {height} px: images must have "
            f"1 to {MAX_PIXELS:,} px; use a smaller size, or remove the image"
        )
    first_row, first_column, rows, columns = (0, 0, height, width) if window is None else window
    out = torch.empty(3, rows, columns, dtype=torch.uint8)
    if native.unavailable_reason() is not None:
        whole = _resize_by_pil(image, size)
        return out.copy_(whole[:, first_row : first_row + rows, first_column : first_column + columns])
    if image.stride(0) != 1 or image.stride(2) != 3:
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    vertical_first = _PIL_CHOOSES_ORDER and image_height - height > max(0, 2 * (image_width - width))
    region = 0, 0, image_width, image_height
    torch.ops.zoo.resize_into.default(out, image, *size, *region, first_row, first_column, vertical_first)
    return out


def _resize_by_pil(image: Tensor, size: tuple[int, int]) -> Tensor:
    source = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = source.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
