"""``zoo reproduce imagenet``: measure the published scores again, and write both side by side."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.engine.protocols import Protocol
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED, ZooError

if TYPE_CHECKING:
    from zoo.data.validation_set import ValidationSet
    from zoo.engine.process import Process
    from zoo.reproduce.compare import Row
    from zoo.reproduce.entries import Entry
    from zoo.reproduce.reproduction import Reproduction
    from zoo.scoring import LoadedNetwork

OUT = Path("runs/reproduce")


def run(args: argparse.Namespace) -> int:
    """Measure what can be measured and write the report after each row; returns the exit code."""
    from zoo.data.validation_set import describe_validation_set
    from zoo.engine.process import open_process
    from zoo.reproduce.entries import build_entries

    with open_process(args.local_rank, args.dist_backend) as process:
        data = process.broadcast(describe_validation_set(args.data) if process.is_main else None)
        if args.limit is not None and args.limit >= data.images > 0:
            args.limit = None  # which is then no limit
        entries = build_entries(args.models, args.protocols)
        run = Run(args, process, data, entries)
        for entry in entries:
            run.measure(entry)
        return run.finish()


class Run:
    """One run of the command: its rows, in the order of the table, and the files that they are written to."""

    def __init__(
        self, args: argparse.Namespace, process: Process, data: ValidationSet, entries: Sequence[Entry]
    ) -> None:
        from zoo.report.environment import describe_environment, warn_of_changes
        from zoo.reproduce.reproduction import Reproduction

        self._args, self._process, self._data, self._entries = args, process, data, entries
        self._environment = describe_environment(process.device)
        if process.is_main:
            warn_of_changes()
        # Only rank 0 reads and writes the report: the folder may be on its machine alone.
        self._files: Reproduction | None = Reproduction(args.out) if process.is_main else None
        self._unresolved: str | None = None  # the network at which the server of the weights turned out to be unknown
        self._rows: dict[tuple[str, str], Row] = process.broadcast(self._planned_rows() if process.is_main else None)
        self._write()

    def _planned_rows(self) -> dict[tuple[str, str], Row]:
        return {
            (entry.name, protocol.name): self._planned_row(entry, protocol)
            for entry in self._entries
            for protocol in entry.protocols
        }

    def _planned_row(self, entry: Entry, protocol: Protocol) -> Row:
        from zoo.reproduce.compare import Row

        assert self._files is not None
        known = self._files.find(
            network=entry.name,
            protocol=protocol.name,
            weights_md5=entry.weights_md5,
            data=self._data.digest,
            limit=self._args.limit,
        )
        row = Row(
            network=entry.name,
            protocol=protocol.name,
            published=entry.scores.get(protocol.name.partition("-")[0]),
            source=entry.source,
            weights_md5=entry.weights_md5,
            command=_command(self._args, entry.name),
        )
        return replace(row, reason="not yet") if known is None else replace(row, measured=known, reused=True)

    def measure(self, entry: Entry) -> None:
        """Score a network by those protocols that no earlier run has scored it by, and write each row at once."""
        pending = [protocol for protocol in entry.protocols if self._rows[entry.name, protocol.name].measured is None]
        if not pending:
            return
        subject, fault = (None, "no data") if self._data.fault is not None else self._load(entry)
        for protocol in pending:
            key = entry.name, protocol.name
            if subject is None:
                self._rows[key] = replace(self._rows[key], reason=fault)
            else:
                measured = self._score(entry, subject, protocol)
                self._rows[key] = replace(self._rows[key], measured=measured, reason=None)
            self._write()

    def _load(self, entry: Entry) -> tuple[LoadedNetwork | None, str | None]:
        """Return the network, or on all ranks None and what is wrong on one of them."""
        from zoo.scoring import load_network
        from zoo.weights.cache import weights_path
        from zoo.weights.download import UnresolvedError

        subject, fault = None, None
        if self._unresolved is not None and entry.file is None and not weights_path(entry.name).exists():
            fault = f"no weights: see {self._unresolved}"
        else:
            try:
                subject = load_network(entry.file or entry.name)
            except ZooError as error:
                fault = " ".join(str(error).split())
                if isinstance(error, UnresolvedError):  # the same for all the others
                    self._unresolved = entry.name
        faults = [fault for fault in self._process.broadcast(self._process.gather(fault)) if fault is not None]
        return (None, faults[0]) if faults else (subject, None)

    def _score(self, entry: Entry, subject: LoadedNetwork, protocol: Protocol) -> dict[str, Any]:
        from zoo.scoring import score

        args, start_s = self._args, time.monotonic()
        result = score(
            subject,
            args.data,
            protocol,
            process=self._process,
            workers=args.workers,
            batch_size=args.batch_size,
            limit=args.limit,
            on_bad_image=args.on_bad_image,
            print_freq=args.print_freq,
        )
        measured = {
            "network": entry.name,
            **subject.result_json(result, self._process),
            "data": self._data.digest,
            "limit": args.limit,
            "processes": self._process.world_size,
            "seconds": round(time.monotonic() - start_s, 1),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if self._files is not None:
            self._files.add(measured)
        return measured

    def _write(self) -> None:
        if self._files is not None:
            rows = list(self._rows.values())
            self._files.write(rows, self._data, self._missing(), self._environment, self._args.limit)

    def _missing(self) -> list[str]:
        """Return what keeps rows from being measured, and where it is expected."""
        from zoo.data.validation_set import expected_layout
        from zoo.weights.cache import weights_path

        lines = []
        if not self._data.is_imagenet:
            found = self._data.fault or f"{self._data.folder} is something else: {self._data.difference}"
            lines.append(f"{found}; {expected_layout(self._args.data)}")
        for entry in self._entries:
            waiting = any(self._rows[entry.name, protocol.name].measured is None for protocol in entry.protocols)
            if waiting and entry.file is None and not (file := weights_path(entry.name)).exists():
                lines.append(
                    f"the weights of {entry.name} are expected as {file} (md5 {entry.weights_md5}): "
                    f"`zoo fetch {entry.name}` fetches them"
                )
        return lines

    def finish(self) -> int:
        """Print the report and return the exit code."""
        if self._files is not None:
            print(self._files.markdown_path.read_text(encoding="utf-8"))
            print(f"written to {self._files.markdown_path} and {self._files.json_path}")
        if any(row.is_off(self._data) for row in self._rows.values()):
            return EXIT_VERIFICATION_FAILED
        return EXIT_USER_ERROR if any(row.measured is None for row in self._rows.values()) else 0


def _command(args: argparse.Namespace, name: str) -> str:
    words = ["zoo", "reproduce", args.benchmark, "--data", str(args.data), "--models", name]
    words += ["--protocols", *args.protocols] if args.protocols else []
    words += ["--out", str(args.out)] if args.out != OUT else []
    words += ["--limit", str(args.limit)] if args.limit else []
    return shlex.join(words)
