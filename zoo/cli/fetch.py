"""``zoo fetch`` and ``zoo verify``: download published weights into the cache, and check the files there."""

from __future__ import annotations

import argparse
import logging

from zoo.errors import VerificationError, WeightsError, listed, printable

logger = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``fetch`` and ``verify``."""
    parser = commands.add_parser("fetch", help="download published weights into the cache and verify them")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="published weights, or 'all' (default: list them)",
    )
    parser.set_defaults(run=run_fetch)
    parser = commands.add_parser("verify", help="compare the md5 of the weights in the cache with the published one")
    parser.add_argument("names", metavar="NAME", nargs="*", help="published weights (default: all files in the cache)")
    parser.set_defaults(run=run_verify)


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch the named weights and print the path of each, or print a table of all weights; returns 0.

    A failed download is logged and the others continue; WeightsError is raised at the end.
    """
    from zoo.weights import fetch_weights
    from zoo.weights.download import UnresolvedError
    from zoo.weights.published import entry_of, published

    if not args.names:
        return _list()
    names = list(published()) if args.names == ["all"] else args.names
    for name in names:  # find a wrong name before the first download
        entry_of(name)
    failed = []
    for name in names:
        try:
            print(fetch_weights(name))
        except WeightsError as error:
            if len(names) == 1 or isinstance(error, UnresolvedError):  # without a network the others would fail too
                raise
            logger.warning("%s", error)
            failed.append(name)
    if failed:
        raise WeightsError(
            f"{len(failed)} of {len(names)} files were not fetched: {listed(failed)}; run the same command again"
        )
    return 0


def _list() -> int:
    from zoo.tables import markdown_table
    from zoo.weights.cache import weights_dir, weights_path
    from zoo.weights.published import published

    rows = []
    for name, entry in published().items():
        path = weights_path(name)
        size_mb = path.stat().st_size / 1e6 if path.is_file() else None
        rows.append([name, "yes" if size_mb is not None else "no", size_mb, entry.md5, entry.weights.licence])
    print(markdown_table(["name", "in the cache", "MB", "md5", "licence"], rows))
    print(f"The cache is {weights_dir()}; zoo fetch NAME downloads, zoo verify reads and compares.")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print the state of each file; returns 0.

    Raises VerificationError if a file is damaged, or if a named file is missing or partial.
    """
    from zoo.tables import markdown_table
    from zoo.weights.cache import audit_cache, weights_dir

    entries = audit_cache(args.names)
    if not entries:
        print(f"{weights_dir()} holds no weights; zoo fetch lists what can be downloaded.")
        return 0
    rows = [[printable(entry.path), entry.status, entry.sha256, entry.note] for entry in entries]
    print(markdown_table(["file", "state", "sha256", "note"], rows))
    faults = {"damaged", "missing", "partial"} if args.names else {"damaged"}
    bad = [entry for entry in entries if entry.status in faults]
    if bad:
        faulty = listed(f"{entry.path.name} is {entry.status}" for entry in bad)
        raise VerificationError(f"{len(bad)} of {len(entries)} files are not as published: {faulty}; see their notes")
    return 0
