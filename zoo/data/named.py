"""Data sets by name: torchvision:NAME of torchvision, hf:NAME of the Hugging Face Hub.

torchvision's data sets are in the folder torchvision of the cache, where they are downloaded unless they exist. The
package ``datasets`` loads and caches data sets of the Hub; NAME may also be a folder with Parquet files or images.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch.utils.data import Dataset
from torchvision import datasets as of_torchvision

from zoo.data.imagenet import NUM_CLASSES, imagenet_names, imagenet_wnids
from zoo.data.map_dataset import Datasets
from zoo.data.sources.location import DataName, DataPath
from zoo.errors import DataError, join_names, nearest
from zoo.files import cache_dir, file_lock, is_offline

VAL_SPLITS = ("val", "validation", "test")  # the first that exists is the validation set
MAX_OTHER_NAMES = 10  # class names that differ from torchvision's; the Hub has some, such as "crane2"


def open_data(data: DataPath | DataName) -> DataPath | Datasets:
    """Return the data set that ``data`` names; any other ``data`` unchanged.

    Raises DataError if it cannot be loaded, and unless it has a training and a validation split of classified images.
    """
    if not isinstance(data, DataName):
        return data
    return (_open_torchvision if data.package == "torchvision" else _open_hub)(data)


def _open_torchvision(data: DataName) -> Datasets:
    build = getattr(of_torchvision, data.name) if data.name in of_torchvision.__all__ else None
    parameters = inspect.signature(build).parameters if build is not None else {}
    if build is None or not parameters.keys() & {"train", "split"}:
        hint = nearest(data.name, of_torchvision.__all__, "torchvision.datasets lists all")
        raise DataError("torchvision has no such data set with a training split", data, hint)
    if "train" in parameters:
        return Datasets(_build(data, build, train=True), _build(data, build, train=False))
    train = _build(data, build, split="train")
    for split in VAL_SPLITS:
        try:
            return Datasets(train, _build(data, build, split=split))
        except ValueError:  # it has no split of this name
            continue
    raise DataError(f"it has none of the splits {', '.join(VAL_SPLITS)}", data, "choose another data set")


def _build(data: DataName, build: Any, **split: Any) -> Dataset[Any]:
    """Return a split of a data set of torchvision; one of several processes downloads it."""
    root = cache_dir() / "torchvision"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(root / f".{data.name}.lock"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about the age of pickles
            try:
                return build(root, **split)
            except RuntimeError:  # it is not there
                if is_offline() or "download" not in inspect.signature(build).parameters:
                    raise
                return build(root, **split, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        remedy = f"download it to {root} as torchvision.datasets.{data.name} expects it"
        raise DataError(f"torchvision cannot load it: {error}", data, remedy) from error


def _open_hub(data: DataName) -> Datasets:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"the package datasets cannot be imported: {error}", data, "pip install datasets") from error
    try:
        splits = datasets.load_dataset(data.name)
    except Exception as error:  # the package raises errors of many others
        raise DataError(f"the package datasets cannot load it: {error}", data, "check the name") from error
    val = next((split for split in VAL_SPLITS if split in splits), None)
    if "train" not in splits or val is None:
        what = f"its splits are {join_names(splits)}, not train and one of {', '.join(VAL_SPLITS)}"
        raise DataError(what, data, "choose another data set")
    return Datasets(*(_images_and_labels(data, splits[split]) for split in ("train", val)))


def _images_and_labels(data: DataName, rows: Any) -> Any:
    """Return the columns of images and labels as "image" and "label"; DataError unless there is one of each.

    The attribute ``classes`` has the names of the classes, as in torchvision's data sets; the names of ImageNet's
    classes become wnids, as in class folders.
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
    rows.classes = _as_wnids(rows.features["label"].names)
    return rows


def _as_wnids(names: list[str]) -> list[str]:
    """Return wnids for the names of ImageNet's classes in their order, of which the Hub lists all synonyms."""
    pairs = zip((name.partition(",")[0] for name in names), imagenet_names(), strict=False)
    num_other = sum(name != known.partition(",")[0] for name, known in pairs)
    return list(imagenet_wnids()) if len(names) == NUM_CLASSES and num_other <= MAX_OTHER_NAMES else names
