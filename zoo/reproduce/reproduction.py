"""The files of a reproduction: a report in Markdown and JSON, which keeps all that was ever measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from zoo.data.validation_set import ValidationSet
from zoo.errors import ConfigError, printable
from zoo.files import write_json, write_text
from zoo.reproduce.compare import Row, markdown_report

BENCHMARK = "imagenet"
#: Two measurements that agree in these are the same one.
IDENTITY = ("network", "protocol", "weights_md5", "data", "limit")
SHOWN = ("top1", "top5", "count", "environment", "finished")


class Reproduction:
    """``imagenet.json`` and ``imagenet.md`` in ``folder``; what an earlier run measured is taken over.

    Raises ConfigError if the JSON file there is something else.
    """

    def __init__(self, folder: Path) -> None:
        self.json_path, self.markdown_path = folder / f"{BENCHMARK}.json", folder / f"{BENCHMARK}.md"
        self._measurements = _earlier(self.json_path)

    def find(self, **identity: Any) -> dict[str, Any] | None:
        """Return the measurement with this network, protocol, weights_md5, data (digest) and limit, or None."""
        wanted = tuple(identity[key] for key in IDENTITY)
        return next((known for known in self._measurements if _identity(known) == wanted), None)

    def add(self, measurement: Mapping[str, Any]) -> None:
        """Keep a measurement from now on; `write` puts it on the disk."""
        self._measurements.append(dict(measurement))

    def write(
        self,
        rows: Sequence[Row],
        data: ValidationSet,
        missing: Sequence[str],
        environment: Mapping[str, Any],
        limit: int | None,
    ) -> None:
        """Write both files, each whole or not at all; the JSON file keeps measurements that no row shows, too.

        The arguments are those of `zoo.reproduce.compare.markdown_report`.
        """
        content = {
            "benchmark": BENCHMARK,
            "data": {**asdict(data), "is_imagenet": data.is_imagenet},
            "limit": limit,
            "environment": dict(environment),
            "missing": list(missing),
            "rows": [row.to_json(data) for row in rows],
            "measurements": self._measurements,
        }
        write_json(self.json_path, content)
        write_text(self.markdown_path, markdown_report(rows, data, missing, environment, limit))


def _identity(measurement: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(measurement[key] for key in IDENTITY)


def _earlier(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["benchmark"] != BENCHMARK:
            raise ValueError
        measurements: list[dict[str, Any]] = content["measurements"]
        for known, key in product(measurements, (*IDENTITY, *SHOWN)):
            known[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"there is a file that is no report of zoo reproduce; {printable(path)}: remove it, or give another --out"
        ) from error
    return measurements
