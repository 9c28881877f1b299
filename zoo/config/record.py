"""`NetworkRecord`: the description of the network in a weights file. Does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from zoo.config.limits import MAX_CLASSES, MAX_SIDE, CropMode, Interpolation
from zoo.config.network import STORED_ALONE, Spec, parse_spec
from zoo.config.section import Section, parse_section
from zoo.errors import DataError, WeightsError, escape, join_names
from zoo.tables import counted

PER_CHANNEL = Field(min_length=3, max_length=3)
# File systems allow 255 characters, and `escape` may turn each into ten.
MAX_NAME_CHARS = 2550


def _check_scale(value: int) -> int:
    if value == 0:
        raise ValueError("should be at least 1, or -1 for no resizing")
    return value


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("should contain only characters that a terminal can show")
    return name


def _check_unique(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"should have each name once; found twice: {join_names(twice)}")
    return names


Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Scale = Annotated[int, Field(ge=-1, le=MAX_SIDE), AfterValidator(_check_scale)]
ClassName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_check_name)]
ClassNames = Annotated[list[ClassName], Field(max_length=MAX_CLASSES), AfterValidator(_check_unique)]


class Preprocessing(Section):
    """Preprocessing of validation images."""

    scale_val: Scale = 256
    """Validation images are resized to this length of their shorter side; -1: not resized."""
    crop_val: Side = 224
    """Side of the center crop of validation images."""
    mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], PER_CHANNEL] = Field(default=[0.485, 0.456, 0.406])
    """Mean of red, green and blue (values from 0 to 1), which is subtracted."""
    std: Annotated[list[Annotated[float, Field(gt=0, le=1)]], PER_CHANNEL] = Field(default=[0.229, 0.224, 0.225])
    """Standard deviation of red, green and blue, by which values are divided."""

    interpolation_val: Interpolation = "bilinear"
    """Interpolation of validation images, antialiased."""
    crop_mode_val: CropMode = "center"
    """How validation images are resized before the crop, as in timm. center: the shorter side to scale_val; squash:
    both sides, which changes the aspect ratio."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield problems of crops that are larger than the resized image, and of images that are not resized."""
        if self.scale_val == -1 and self.crop_mode_val != "center":
            yield "crop_mode_val", "needs a scale_val to resize to"
        if self.scale_val != -1 and self.crop_val > self.scale_val:
            yield "crop_val", f"should be at most scale_val, which is {self.scale_val}"

    def preprocessing(self) -> Preprocessing:
        """Return the settings of this class, without the settings of subclasses."""
        return Preprocessing(**{key: getattr(self, key) for key in Preprocessing.model_fields})


class NetworkRecord(Section):
    """A network as a weights file describes it.

    Args:
    - `spec`: the network of the weights.
    - `preprocessing`: preprocessing of images for the network; None if unknown.
    - `class_names`: names of the outputs, in order, escaped by `escape`; None if unknown. There may be fewer than
      outputs.
    """

    spec: Spec
    preprocessing: Preprocessing | None = None
    class_names: ClassNames | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if there are more names than outputs."""
        if self.class_names is not None and len(self.class_names) > self.spec.num_classes:
            names, classes = counted(len(self.class_names), "name"), counted(self.spec.num_classes, "class")
            yield "class_names", f"has {names} for {classes}"

    def with_spec(self, spec: Spec) -> NetworkRecord:
        """Return a copy with another spec; drops the class names if the number of classes differs."""
        names = self.class_names if spec.num_classes == self.spec.num_classes else None
        return self.model_copy(update={"spec": spec, "class_names": names})

    def content(self) -> dict[str, Any]:
        """Return the JSON object that files store: the settings of the network, and the other known fields."""
        known = self.model_dump(mode="json", exclude={"spec"}, exclude_none=True)
        return {**self.spec.model_dump(mode="json"), **known}


def parse_record(content: Mapping[str, Any], source: str) -> NetworkRecord:
    """Parse the JSON object under "network" in a weights file. ``source`` names it in messages.

    Raises WeightsError for invalid settings, and ConfigError for unknown architectures.
    """
    settings = {key: value for key, value in content.items() if key not in STORED_ALONE}
    known = {key: content[key] for key in STORED_ALONE if key in content}
    spec = parse_spec(settings, source, ("network",), WeightsError)
    return parse_section(NetworkRecord, {"spec": spec, **known}, source, ("network",), WeightsError)


def escape_names(names: Iterable[str]) -> list[str]:
    """Return the names of class folders escaped by `escape`, as specs and messages use them.

    Raises DataError if two names become equal.
    """
    escaped = [escape(name) for name in names]
    if twice := [name for name, count in Counter(escaped).items() if count > 1]:
        raise DataError(f"names of class folders look the same when printed: {join_names(twice)}; rename one of each")
    return escaped
