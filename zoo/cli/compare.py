"""``zoo compare``: test whether two networks differ, from their predictions of the same images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.cli.options import Command, argument, check_writable
from zoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Test whether the predictions of two networks differ by more than chance.

    Both files hold predictions of the same images, as zoo validate --predictions writes them. The test is McNemar's
    exact test on the images that only one of the two networks classifies correctly.
    """

    first: Path = argument("A.csv")
    """Predictions of a network."""
    second: Path | None = argument("B.csv", default=None)
    """Predictions of another network; without it, A is scored."""
    real: Path | None = None
    """Score with the ImageNet-ReaL labels, real.json of google-research/reassessed-imagenet, instead of the classes of
    the folders."""
    json: Path | None = None
    """Write the scores and the test to FILE."""

    def run(self) -> int:
        """Print the scores and the result of the test, and write the requested file."""
        import torch

        from zoo.files import write_json
        from zoo.run.environment import describe_environment
        from zoo.run.paired_predictions import score_files

        check_writable(self.json)
        inputs = [file for file in (self.first, self.second) if file is not None]
        for file in (*inputs, self.real):
            if self.json is not None and file is not None and self.json.resolve() == file.resolve():
                raise ConfigError("--json would overwrite an input", file, "name another file")
        scored = score_files(inputs, self.real)
        print(scored.table("folders" if self.real is None else "ImageNet-ReaL"))
        if self.json is not None:
            environment = describe_environment(torch.device("cpu"))
            write_json(self.json, {"command": self.command_line, "environment": environment, **scored.to_json()})
        return 0
