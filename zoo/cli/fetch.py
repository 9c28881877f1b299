"""``zoo fetch``: download published weights into the cache."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.cli.options import Command, argument


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Download published weights into the cache and verify them."""

    example = "zoo fetch resnet50_ipabn-sync_lr_512"
    names: tuple[str, ...] = argument("NAME")
    """Published weights (zoo list --pretrained); 'all' downloads all of them."""

    def run(self) -> int:
        """Download the weights and print the path of each file."""
        from zoo.config.published import entry_of, published
        from zoo.weights import fetch_weights

        names = list(published()) if self.names == ("all",) else self.names
        for name in names:  # reports an unknown name before the first download
            entry_of(name)
        for name in names:
            print(fetch_weights(name))
        return 0
