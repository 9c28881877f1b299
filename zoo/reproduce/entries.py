"""The networks that a reproduction measures, and what is published or expected of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo import scoring
from zoo.engine.protocols import PROTOCOLS, Protocol
from zoo.errors import ConfigError, nearest
from zoo.registry import list_models, published
from zoo.reproduce.compare import Score
from zoo.weights import md5_of


@dataclass(frozen=True)
class Entry:
    """A network of the table: a published one, or a checkpoint (``file``) with the scores expected of it."""

    name: str
    protocols: Sequence[Protocol]
    scores: Mapping[str, Score]
    source: str | None
    weights_md5: str
    file: Path | None


def build_entries(names: Sequence[str], protocols: Sequence[str] | None) -> list[Entry]:
    """Return the networks that patterns and checkpoint files stand for, each once, in the published order.

    ``protocols``: names of the published ones; None for all of them, and for checkpoints their own crop.
    Raises ConfigError for a name that is neither.
    """
    chosen: dict[str, None] = {}
    files = []
    for name in names:
        if Path(name).is_file():
            files.append(Path(name))
            continue
        matching = set(list_models(name, pretrained=True))
        if not matching:
            raise ConfigError(
                f"no published network is called {name!r}, and there is no such checkpoint; --models: the nearest "
                f"names are {', '.join(nearest(name, published()))}"
            )
        chosen |= dict.fromkeys(known for known in published() if known in matching)
    protocols = list(dict.fromkeys(protocols or ()))
    entries = [_published_entry(name, protocols or list(PROTOCOLS)) for name in chosen]
    return entries + [_checkpoint_entry(file, protocols) for file in dict.fromkeys(files)]


def _published_entry(name: str, protocols: Sequence[str]) -> Entry:
    entry = published()[name]
    ways = [PROTOCOLS[protocol] for protocol in protocols]
    return Entry(name, ways, entry.scores, entry.source, entry.md5, None)


def _checkpoint_entry(file: Path, protocols: Sequence[str] | None) -> Entry:
    """Return a checkpoint with its own centre crop and ten crops, unless published protocols are asked for."""
    subject = scoring.load_network(file)
    own = subject.own_protocol
    ways = [PROTOCOLS[protocol] for protocol in protocols] if protocols else [own, own._replace(ten_crops=True)]
    expected = subject.experiment.expected
    scores = {key: score.model_dump(exclude_none=True) for key, score in expected.scores.items()} if expected else {}
    return Entry(str(file), ways, scores, expected.source if expected else None, md5_of(file), file)
