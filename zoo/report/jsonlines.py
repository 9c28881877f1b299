"""A file of one JSON object a line, to which a run and all its resumptions append."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records to a file; a killed process or a full disk leaves whole lines only."""

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Append {"event": ..., "time_s": seconds since 1970, ...}; NaN and infinities become null.

        OSError, and nothing of the record is in the file, if the system cannot write it.
        """
        record = {"event": event, "time_s": round(time.time(), 3), **fields}
        text = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        end, left = os.fstat(self._file.fileno()).st_size, f"{text}\n".encode()
        try:
            while left:  # the last bytes of a disk take a part of a record
                left = left[self._file.write(left) :]
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """Put all records on the disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Cut off an incomplete last line, which a full disk or a power failure may have left."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
