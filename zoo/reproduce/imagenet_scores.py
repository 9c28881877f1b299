"""`zoo reproduce imagenet`: measures the published ImageNet scores."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from zoo.config.published import published
from zoo.data.prepare.validation_set import ValidationSet, describe_validation_set, expected_layout
from zoo.engine.process import Process
from zoo.errors import ConfigError, ZooError, nearest
from zoo.files import write_json, write_text
from zoo.names import list_models
from zoo.reproduce.imagenet_table import Row, Score, markdown_report
from zoo.reproduce.options import ImageNetOptions
from zoo.run import scoring
from zoo.run.cost import CostMeter
from zoo.run.environment import describe_environment, utc_now, warn_of_changes
from zoo.tasks.protocols import PROTOCOLS, CropProtocol, center_crop
from zoo.weights import md5_of
from zoo.weights.cache import weights_path
from zoo.weights.download import UnresolvedError

# Keys that identify a measurement.
IDENTITY_KEYS = ("network", "protocol", "weights_md5", "data", "limit")
SHOWN_KEYS = ("top1", "top5", "count", "environment", "finished")
ROW_KEYS = ("network", "protocol", "measured", "command", "verdict")


def reproduce_imagenet(options: ImageNetOptions, process: Process) -> ImageNetRun:
    """Score all available networks and write the report after each row; all ranks have the same rows.

    Rows that an earlier run measured with the same weights, data and limit are reused from the report in the folder.
    Raises ConfigError for an unknown network, and for a file in the folder that is not such a report.
    """
    data = process.broadcast(describe_validation_set(options.data) if process.is_main else None)
    if options.limit is not None and options.limit >= data.images > 0:
        options = replace(options, limit=None)
    run = ImageNetRun(options, process, data, build_entries(options.models, options.protocols))
    run.measure_all()
    return run


@dataclass(frozen=True)
class Entry:
    """A network to score: a published network, or a checkpoint ``file`` with its expected scores."""

    name: str
    protocols: Sequence[CropProtocol]
    scores: Mapping[str, Score]
    source: str | None
    weights_md5: str
    file: Path | None


def build_entries(names: Sequence[str], protocols: Sequence[str] | None) -> list[Entry]:
    """Return the networks that match patterns and checkpoint files, without duplicates, in the published order.

    ``protocols``: names of published protocols. None selects all of them, and the own crop of a checkpoint.
    Raises ConfigError for a name that is neither.
    """
    known = {name: entry for name, entry in published().items() if entry.experiment.task == "classification"}
    chosen: set[str] = set()
    files = []
    for name in names:
        if Path(name).is_file():
            files.append(Path(name))
            continue
        matching = [match for match in list_models(name, pretrained=True) if match in known]
        if not matching:
            raise ConfigError(
                f"no published network is called {name!r}, and there is no such checkpoint",
                "--models",
                f"the nearest names are {', '.join(nearest(name, known))}",
            )
        chosen.update(matching)
    ways = [PROTOCOLS[protocol] for protocol in dict.fromkeys(protocols or ())]
    entries = [
        Entry(name, ways or list(PROTOCOLS.values()), weights.scores, weights.source, weights.md5, None)
        for name, weights in known.items()
        if name in chosen
    ]
    return entries + [_checkpoint_entry(file, ways) for file in dict.fromkeys(files)]


def _checkpoint_entry(file: Path, protocols: Sequence[CropProtocol]) -> Entry:
    """Return a checkpoint with its own center crop and ten crops, unless published protocols are requested."""
    network = scoring.load_network(file)
    own_protocol = center_crop(network.experiment)
    expected = network.experiment.expected
    scores = {key: score.model_dump(exclude_none=True) for key, score in expected.scores.items()} if expected else {}
    source = expected.source if expected else None
    return Entry(
        str(file),
        protocols or [own_protocol, own_protocol._replace(ten_crops=True)],
        scores,
        source,
        md5_of(file),
        file,
    )


class ImageNetRun:
    """A run: its rows by network and protocol, in the order of the table, and its report.

    ``markdown`` is the report on rank 0, and empty on the others.
    """

    def __init__(
        self, options: ImageNetOptions, process: Process, data: ValidationSet, entries: Sequence[Entry]
    ) -> None:
        self._options, self._process, self._data, self._entries = options, process, data, entries
        self._environment = describe_environment(process.device)
        if process.is_main:
            warn_of_changes()
        # Only rank 0 reads and writes the report: the folder may be on its machine alone.
        self._measurements = read_imagenet_report(options.out)["measurements"] if process.is_main else []
        self._unresolved: str | None = None  # the network whose download failed because the server cannot be resolved
        self.markdown = ""
        rows = [self._planned_row(entry, protocol) for entry in entries for protocol in entry.protocols]
        self.rows: dict[tuple[str, str], Row] = process.broadcast({(row.network, row.protocol): row for row in rows})
        self._write()

    def _planned_row(self, entry: Entry, protocol: CropProtocol) -> Row:
        """Return the row with the measurement of an earlier run, if any."""
        wanted = (entry.name, protocol.name, entry.weights_md5, self._data.digest, self._options.limit)
        known = [each for each in self._measurements if tuple(each[key] for key in IDENTITY_KEYS) == wanted]
        return Row(
            network=entry.name,
            protocol=protocol.name,
            published=entry.scores.get(protocol.name.partition("-")[0]),
            source=entry.source,
            weights_md5=entry.weights_md5,
            command=self._options.command_of(entry.name),
            measured=known[0] if known else None,
            reason=None if known else "not yet",
            reused=bool(known),
        )

    @property
    def is_off(self) -> bool:
        """Whether a measured score contradicts the published one."""
        return any(row.verdict(self._data).state == "off" for row in self.rows.values())

    @property
    def is_complete(self) -> bool:
        """Whether all rows were measured."""
        return all(row.measured is not None for row in self.rows.values())

    def measure_all(self) -> None:
        """Score each network by the protocols that are not measured yet, and write the report after each row."""
        for entry in self._entries:
            pending = [way for way in entry.protocols if self.rows[entry.name, way.name].measured is None]
            if not pending:
                continue
            network, fault = (None, "no data") if self._data.fault is not None else self._load(entry)
            for protocol in pending:
                measured = None if network is None else self._score(entry, network, protocol)
                key = entry.name, protocol.name
                self.rows[key] = replace(self.rows[key], measured=measured, reason=fault)
                self._write()

    def _load(self, entry: Entry) -> tuple[scoring.LoadedNetwork | None, str | None]:
        """Return the network, or on all ranks None and the error of one of them."""
        network, fault = None, None
        if self._unresolved is not None and entry.file is None and not weights_path(entry.name).exists():
            fault = f"no weights: see {self._unresolved}"
        else:
            try:
                network = scoring.load_network(entry.file or entry.name)
            except ZooError as error:
                fault = " ".join(str(error).split())
                if isinstance(error, UnresolvedError):  # it will be the same for all the others
                    self._unresolved = entry.name
        faults = [fault for fault in self._process.broadcast(self._process.gather(fault)) if fault is not None]
        return (None, faults[0]) if faults else (network, None)

    def _score(self, entry: Entry, network: scoring.LoadedNetwork, protocol: CropProtocol) -> dict[str, Any]:
        options, process, start_s = self._options, self._process, time.monotonic()
        cost = CostMeter(process.device, process.world_size)
        result = scoring.score(
            network,
            options.data,
            protocol,
            process=self._process,
            workers=options.workers,
            batch_size=options.batch_size,
            limit=options.limit,
            on_bad_image=options.on_bad_image,
            log_every=options.log_every,
        )
        measured = {
            "network": entry.name,
            **network.result_json(result, self._process),
            "data": self._data.digest,
            "limit": options.limit,
            "processes": self._process.world_size,
            "seconds": round(time.monotonic() - start_s, 1),
            "cost": cost.read(),
            "finished": utc_now(),
        }
        self._measurements.append(measured)
        return measured

    def _write(self) -> None:
        """Write imagenet.json, with all measurements, and imagenet.md."""
        if not self._process.is_main:
            return
        data, folder, rows, missing = self._data, self._options.out, list(self.rows.values()), self._missing()
        self.markdown = markdown_report(rows, data, missing, self._environment, self._options.limit)
        content = {
            "benchmark": "imagenet",
            "command": self._options.command_line,
            "data": {**asdict(data), "is_imagenet": data.is_imagenet},
            "limit": self._options.limit,
            "environment": self._environment,
            "missing": missing,
            "rows": [row.to_json(data) for row in rows],
            "measurements": self._measurements,
        }
        write_json(folder / "imagenet.json", content)
        write_text(folder / "imagenet.md", self.markdown)

    def _missing(self) -> list[str]:
        """Return a line for each missing input, with its expected path."""
        lines = []
        if not self._data.is_imagenet:
            kind = "a part of it" if self._data.is_part else "something else"
            problem = self._data.fault or f"{self._data.folder} is {kind}: {self._data.difference}"
            lines.append(f"{problem}; {expected_layout(self._options.data)}")
        for entry in self._entries:
            waiting = any(self.rows[entry.name, protocol.name].measured is None for protocol in entry.protocols)
            if waiting and entry.file is None and not (file := weights_path(entry.name)).exists():
                lines.append(
                    f"the weights of {entry.name} are expected as {file} (md5 {entry.weights_md5}): "
                    f"`zoo fetch {entry.name}` fetches them"
                )
        return lines


def read_imagenet_report(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the "measurements" and "rows" in ``folder``/imagenet.json, if any; ConfigError for a foreign file."""
    path = folder / "imagenet.json"
    if not path.exists():
        return {"measurements": [], "rows": []}
    try:
        content: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        if content["benchmark"] != "imagenet":
            raise ValueError
        for known, key in product(content["measurements"], (*IDENTITY_KEYS, *SHOWN_KEYS)):
            known[key]
        for row, key in product(content["rows"], ROW_KEYS):
            row[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the file is not a report of zoo reproduce imagenet", path, "remove it, or give another --out"
        ) from error
    return content
