"""Map-style data sets of (image, label) as a source of encoded images, for ``zoo data shard``.

Tested by tests/data/test_named.py.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.data.map_dataset import class_names_of
from zoo.data.named import HubImages
from zoo.data.scan import check_filled
from zoo.errors import DataError


class DatasetSource:
    """The images of a map-style data set, see `zoo.data.source.Source`.

    Files of the Hub are read as they are; images that the data set decodes become PNG files. Labels are read at once.
    Raises DataError for labels without class names.

    Args:
    - `dataset`: `HubImages`, or index -> (PIL image, label).
    - `split`: name of the split, for messages.
    """

    def __init__(self, dataset: Any, split: str) -> None:
        self.root = Path(split)
        self.classes = class_names_of(dataset)
        self._images: Any = dataset
        if isinstance(dataset, HubImages):
            from datasets import Image as Encoded

            self._images = dataset.rows.cast_column("image", Encoded(decode=False))
            targets = self._images["label"]
        else:
            known = getattr(dataset, "targets", None)
            targets = [dataset[index][1] for index in range(len(dataset))] if known is None else known
        self.targets = np.array([int(target) for target in targets], dtype=np.int32)
        self.names = np.array([b"%d" % index for index in range(len(self.targets))])
        if (self.targets < 0).any() or (self.targets >= len(self.classes)).any():
            what = f"its labels are not classes from 0 to {len(self.classes) - 1}"
            raise DataError(what, self.root, "give a data set whose images have labels and whose classes have names")
        check_filled(self.root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes=True)

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """The targets, see `Source`."""
        return (self.targets,)

    def read(self, index: int) -> bytes:
        """Return the encoded image ``index``."""
        item = self._images[index]
        if isinstance(item, dict):
            encoded: bytes | None = item["image"]["bytes"]
            return Path(item["image"]["path"]).read_bytes() if encoded is None else encoded
        file = io.BytesIO()
        item[0].save(file, "PNG")
        return file.getvalue()

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random permutation of the images."""
        return torch.randperm(len(self.names), generator=generator)
