"""``zoo fetch``: download published weights into the cache.

Tested by tests/weights/test_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zoo.cli.options import Command, argument


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Download published weights into the cache and verify them."""

    names: tuple[str, ...] = argument("NAME", default=())
    """Published weights; 'all' downloads all of them (default: list them)."""

    def run(self) -> int:
        """Download the weights and print the path of each file; without names, print a table of all."""
        from zoo.config.published import entry_of, published
        from zoo.weights import fetch_weights

        if not self.names:
            return _list()
        names = list(published()) if self.names == ("all",) else self.names
        for name in names:  # report an unknown name before the first download
            entry_of(name)
        for name in names:
            print(fetch_weights(name))
        return 0


def _list() -> int:
    from zoo.config.published import published
    from zoo.tables import markdown_table
    from zoo.weights.cache import weights_dir, weights_path

    rows = []
    for name, entry in published().items():
        path = weights_path(name)
        size_mb = path.stat().st_size / 1e6 if path.is_file() else None
        rows.append([name, "yes" if size_mb is not None else "no", size_mb, entry.md5, entry.weights.license])
    print(markdown_table(["name", "in the cache", "MB", "expected md5", "license"], rows))
    print(f"The cache is {weights_dir()}; zoo fetch NAME downloads and verifies.")
    return 0
