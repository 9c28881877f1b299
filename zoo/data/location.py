"""Where a data set is: a folder of this machine, or the address of one on a server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import DataError, hide_password

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class RemoteFolder:
    """A folder on a server, by its address, such as ``https://host/path`` or ``s3://bucket/path``.

    ``str`` and ``os.fspath`` return the address without the password that ``url`` may contain.
    """

    url: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        """The folder that contains this one."""
        return RemoteFolder(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}")

    def __str__(self) -> str:
        return hide_password(self.url)

    def __fspath__(self) -> str:
        return str(self)


DataPath = Path | RemoteFolder


def parse_data_path(text: str | os.PathLike[str]) -> DataPath:
    """Return the folder that ``text`` names: a path, or an address, which begins with PROTOCOL://."""
    if isinstance(text, RemoteFolder):
        return text
    name = os.fspath(text)
    return RemoteFolder(name.rstrip("/")) if ADDRESS.match(name) else Path(name)


def require_local(data: DataPath) -> Path:
    """Return ``data``; raise DataError if it is on a server."""
    if isinstance(data, RemoteFolder):
        raise DataError(
            "only shards of classification data are read from a server", data, "copy the data to this machine"
        )
    return data
