"""The published weights: experiments with the address of their weights.

The index of networks lists their names, and checksums.md5 the digests of the original project's files. Other files have
a SHA-256 in their experiment. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from zoo.config.architectures import read_index
from zoo.config.experiment import Expected, Experiment, PublishedWeights
from zoo.config.parse import experiments_dir, find_experiment, load_experiment
from zoo.config.record import NetworkRecord
from zoo.errors import ConfigError, nearest

WEIGHTS_SUFFIX = ".pth.tar"


class Digest(NamedTuple):
    """Digest of a file: "md5" or "sha256", and its hexadecimal digits."""

    kind: str
    digits: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclass
class Published:
    """Published weights.

    Args:
    - `name`: name of the weights and of their experiment.
    - `digest`: digest of the file as its authors published it.
    - `weights`: address and license of the file.
    - `expected`: published scores and their source.
    - `experiment`: settings of the training.
    """

    name: str
    digest: Digest
    weights: PublishedWeights
    expected: Expected
    experiment: Experiment

    @property
    def arch(self) -> str:
        """The name of the architecture."""
        return self.experiment.network.arch

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The published scores by protocol, in percent: top1, and top5 where it was published, or miou."""
        return {protocol: score.model_dump(exclude_none=True) for protocol, score in self.expected.scores.items()}

    @property
    def page(self) -> str:
        """The address of the file for a browser."""
        return self.weights.url or f"https://drive.google.com/file/d/{self.weights.drive_id}/view"


@cache
def published() -> dict[str, Published]:
    """Return the published weights by name: in the order of checksums.md5, and then those with a SHA-256, sorted."""
    lines = (experiments_dir().parent / "checksums.md5").read_text(encoding="ascii").splitlines()
    md5s = {name.removesuffix(WEIGHTS_SUFFIX): md5 for md5, name in map(str.split, lines)}
    return {name: _published(name, md5s.get(name)) for name in read_index()["published"]}


def entry_of(name: str) -> Published:
    """Return the entry of the published weights ``name``.

    Raises ConfigError for an unknown name, with the nearest names; for an architecture, with the names of its weights.
    """
    if name in published():
        return published()[name]
    of_arch = [variant for variant, entry in published().items() if entry.arch == name]
    if of_arch:
        raise ConfigError(f"{name} is an architecture; name its published weights: {', '.join(of_arch)}")
    hint = nearest(name, published(), "zoo list --pretrained lists all")
    raise ConfigError(f"no published weights are called {name!r}", remedy=hint)


def published_record(name: str) -> NetworkRecord:
    """Return the record of the published weights ``name``, with the preprocessing of their published scores."""
    return entry_of(name).experiment.record()


def _published(name: str, md5: str | None) -> Published:
    file = find_experiment(name)
    assert file is not None, f"checksums.md5 names {name}, for which there is no experiment file"
    experiment = load_experiment(file, log_notices=False)  # no notices: the user has not named this experiment
    expected = experiment.expected
    assert expected is not None, f"{file} has no scores"
    assert expected.weights is not None, f"{file} does not say where the weights are"
    kind, digits = ("md5", md5) if expected.weights.sha256 is None else ("sha256", expected.weights.sha256)
    assert digits is not None, f"checksums.md5 does not have {name}"
    return Published(name, Digest(kind, digits), expected.weights, expected, experiment)
