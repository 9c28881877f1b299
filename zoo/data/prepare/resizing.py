"""Smaller copies of images, for shards that take less space and less time to decode."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

import PIL
from PIL import features
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.data.reading import decode_as, load_rgb

RESIZED = "resized"  # in the header of an index: how its images were resized and encoded
JPEG_EXTENSION = ".jpg"


@dataclass(frozen=True)
class Resizing:
    """Resizes large images and encodes them as JPEG.

    Args:
    - `shorter_side_px`: length of the shorter side of resized images.
    - `quality`: quality of the JPEG encoder, 1 to 100.
    - `subsampling`: resolution of the colors; 4:2:0 halves it in both directions.
    - `interpolation`: filter, antialiased.
    """

    shorter_side_px: int
    quality: int = 90
    subsampling: str = "4:2:0"
    interpolation: str = "lanczos"

    def apply(self, encoded: bytes, name: str) -> bytes | None:
        """Return the resized image as a JPEG file, or None if its shorter side is at most ``shorter_side_px``.

        The EXIF orientation is neither applied nor kept, because zoo ignores it when it reads images. Raises
        `zoo.data.reading.Unreadable` with the file's ``name`` if the image cannot be decoded.
        """
        return decode_as(encoded, name, self._resized, "an image")

    def facts(self) -> dict[str, Any]:
        """Return the settings and the versions of the encoder, for the index."""
        return {**asdict(self), "pillow": PIL.__version__, "libjpeg_turbo": features.version("libjpeg_turbo")}

    def _resized(self, image: Any) -> bytes | None:
        if min(image.size) <= self.shorter_side_px:
            image.load()  # raises for a truncated image
            return None
        filter_ = InterpolationMode(self.interpolation)
        resized = tvF.resize(load_rgb(image), [self.shorter_side_px], filter_)
        resized.info.clear()  # PIL would write comments of the original
        file = io.BytesIO()
        resized.save(file, "JPEG", quality=self.quality, subsampling=self.subsampling)
        return file.getvalue()
