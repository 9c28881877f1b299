"""Where data are: in a folder of this machine, or in one of a server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import DataError, hide_password, printable

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class RemoteFolder:
    """A folder by its address, such as https://host/path or s3://bucket/path.

    As text, and where the system asks for its name, it is the address without the password that ``url`` may have.
    """

    url: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        """The folder that it is in."""
        return RemoteFolder(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}")

    def __str__(self) -> str:
        return hide_password(self.url)

    def __fspath__(self) -> str:
        return str(self)


Place = Path | RemoteFolder


def place_of(text: str | os.PathLike[str]) -> Place:
    """Return the folder that ``text`` names: a path, or an address, which begins with a protocol and ://."""
    if isinstance(text, RemoteFolder):
        return text
    name = os.fspath(text)
    return RemoteFolder(name.rstrip("/")) if ADDRESS.match(name) else Path(name)


def local(data: Place) -> Path:
    """Return ``data`` if it is a folder of this machine; DataError otherwise."""
    if isinstance(data, RemoteFolder):
        raise DataError(
            f"this needs a folder of this machine, only shards of classified images are read from elsewhere; "
            f"{printable(data)}: copy it here"
        )
    return data
