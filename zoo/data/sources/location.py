"""Location of a data set: a local folder, the address of a folder on a server, or a name in another package."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from zoo.errors import DataError, hide_secrets

DATASET_PACKAGES = ("torchvision", "hf")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class RemoteFolder:
    """A folder on a server, by its address, such as ``https://host/path`` or ``s3://bucket/path``.

    ``str`` and ``os.fspath`` return the address without the password and the query that ``url`` may contain.

    Args:
    - `url`: the address without the query.
    - `query`: the query of a signed web address, from its question mark; appended to the address of every file.
    """

    url: str
    query: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        """The folder that contains this one."""
        return RemoteFolder(self.url.rpartition("/")[0], self.query)

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}", self.query)

    def __str__(self) -> str:
        return hide_secrets(self.url)

    def __fspath__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class DataName:
    """A data set of another package by its name, such as ``torchvision:CIFAR10``, see `zoo.data.named`."""

    package: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}:{self.name}"


DataPath = Path | RemoteFolder


def is_web_address(url: str) -> bool:
    """Return whether ``url`` is the address of a web server, which may have a query."""
    return url.lower().startswith(("http://", "https://"))


def parse_data_path(text: str | os.PathLike[str] | DataName) -> DataPath | DataName:
    """Parse a data set (torchvision:NAME or hf:NAME), an address (PROTOCOL://...), or a path."""
    if isinstance(text, (RemoteFolder, DataName)):
        return text
    name = os.fspath(text)
    if ADDRESS.match(name):
        url, mark, query = name.partition("?") if is_web_address(name) else (name, "", "")
        return RemoteFolder(url.rstrip("/"), mark + query)
    package, _, rest = name.partition(":")
    return DataName(package, rest) if package in DATASET_PACKAGES and rest else Path(name)


def require_local(data: DataPath | DataName) -> Path:
    """Return ``data``. Raises DataError if it is on a server or the name of a data set."""
    if isinstance(data, DataName):
        what = "a data set by name has no folders of files, which this needs"
        raise DataError(what, data, "give a folder, such as one that zoo data shard writes")
    if isinstance(data, RemoteFolder):
        raise DataError(
            "only shards of classification data are read from a server", data, "copy the data to this machine"
        )
    return data
