"""Data sets by name: torchvision:NAME from torchvision, hf:NAME from the Hugging Face Hub.

torchvision's data sets are downloaded to the folder torchvision of the cache. The package ``datasets`` loads and caches
data sets of the Hub; NAME may also be a folder with Parquet files or images.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset
from torchvision import datasets as of_torchvision

from zoo.data.imagenet import NUM_CLASSES, imagenet_names, imagenet_wnids
from zoo.data.map_dataset import Datasets
from zoo.data.sources.location import DataName, DataPath
from zoo.errors import DataError, join_names, nearest
from zoo.files import cache_dir, file_lock, is_offline

# The first split that exists is the training set: the second name for OxfordIIITPet, the third for Places365.
TRAIN_SPLITS = ("train", "trainval", "train-standard")
VAL_SPLITS = ("val", "validation", "test")  # the first that exists is the validation set
AS_OBJECT = "build the data set with torchvision, and pass it to zoo.train"
MAX_OTHER_NAMES = 10  # class names that may differ from torchvision's; on the Hub some do, such as "crane2"


def open_data(data: DataPath | DataName) -> DataPath | Datasets:
    """Open the data set that ``data`` names; return any other ``data`` unchanged.

    Raises DataError if it cannot be loaded, and unless it has a training and a validation split of classified images.
    """
    if not isinstance(data, DataName):
        return data
    return (_open_torchvision if data.package == "torchvision" else _open_hub)(data)


def _open_torchvision(data: DataName) -> Datasets:
    build = getattr(of_torchvision, data.name) if data.name in of_torchvision.__all__ else None
    parameters = inspect.signature(build).parameters if build is not None else {}
    if build is None or not parameters.keys() & {"train", "split"}:
        hint = AS_OBJECT
        if build is None:
            hint = nearest(data.name, of_torchvision.__all__, "torchvision.datasets lists all")
        raise DataError("torchvision has no such data set with a training split", data, hint)
    needed = [name for name, each in parameters.items() if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if more := [name for name in needed if name not in ("root", "split")]:
        raise DataError(f"its class needs more arguments: {join_names(more)}", data, AS_OBJECT)
    if "train" in parameters:
        return Datasets(_build(data, build, train=True), _build(data, build, train=False))
    return Datasets(_first_split(data, build, TRAIN_SPLITS), _first_split(data, build, VAL_SPLITS))


def _first_split(data: DataName, build: Any, splits: Sequence[str]) -> Dataset[Any]:
    """Build the first of ``splits`` that a torchvision data set has. Raises DataError if it has none."""
    reason: BaseException | None = None
    for split in splits:
        try:
            return _build(data, build, split=split)
        except DataError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            reason = error.__cause__  # there is no split of this name
    raise DataError(f"it has none of the splits {', '.join(splits)}: {_one_line(reason)}", data, AS_OBJECT)


def _build(data: DataName, build: Any, **split: Any) -> Dataset[Any]:
    """Build a split of a torchvision data set. If several processes need it, one downloads it."""
    root = cache_dir() / "torchvision"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(root / f".{data.name}.lock"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about the age of pickles
            try:
                return build(root, **split)
            except RuntimeError:  # not downloaded yet
                if is_offline() or "download" not in inspect.signature(build).parameters:
                    raise
                return build(root, **split, download=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged files can raise nearly any error
        remedy = f"download it to {root} as torchvision.datasets.{data.name} expects it"
        raise DataError(f"torchvision cannot load it: {_one_line(error)}", data, remedy) from error


def _open_hub(data: DataName) -> Datasets:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"the package datasets cannot be imported: {error}", data, "pip install datasets") from error
    try:
        splits = datasets.load_dataset(data.name)
    except Exception as error:  # the package passes on errors of many other packages
        raise DataError(f"the package datasets cannot load it: {_one_line(error)}", data, "check the name") from error
    val = next((split for split in VAL_SPLITS if split in splits), None)
    if "train" not in splits or val is None:
        what = f"its splits are {join_names(splits)}, not train and one of {', '.join(VAL_SPLITS)}"
        raise DataError(what, data, "choose another data set")
    return Datasets(*(_images_and_labels(data, split, splits[split]) for split in ("train", val)))


def _one_line(error: BaseException | None) -> str:
    """Return the text of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _images_and_labels(data: DataName, split: str, rows: Any) -> Any:
    """Rename the columns of images and labels to "image" and "label".

    Raises DataError unless there is one column of each kind, and for a row without a class: a test set with withheld
    labels has labels of -1. The attribute ``classes`` has the names of the classes, as in torchvision's data sets;
    names of ImageNet's classes become wnids, as in class folders.
    """
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    columns = {}
    for name, kind in (("image", "Image"), ("label", "ClassLabel")):
        found = [column for column in kinds if kinds[column] == kind]
        if name not in found and len(found) != 1:
            what = (
                f"it needs a column {name} of type {kind}; its columns are {join_names(map(': '.join, kinds.items()))}"
            )
            raise DataError(what, data, "choose another data set, or pass one with these columns to zoo.train")
        columns[name if name in found else found[0]] = name
    rows = rows.select_columns(list(columns)).rename_columns({old: new for old, new in columns.items() if old != new})
    if missing := [label for label in rows.unique("label") if label is None or label < 0]:
        what = f"the split {split} has labels that are no class: {join_names(missing)}"
        raise DataError(what, data, "choose another data set, or pass one with all labels to zoo.train")
    rows.classes = _as_wnids(rows.features["label"].names)
    return rows


def _as_wnids(names: list[str]) -> list[str]:
    """Convert the names of ImageNet's classes, in their order, to wnids. Names on the Hub list all synonyms."""
    pairs = zip((name.partition(",")[0] for name in names), imagenet_names(), strict=False)
    num_other = sum(name != known.partition(",")[0] for name, known in pairs)
    return list(imagenet_wnids()) if len(names) == NUM_CLASSES and num_other <= MAX_OTHER_NAMES else names
