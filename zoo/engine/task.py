"""The contract of a task: everything in which one kind of training differs from another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from zoo.config import Experiment
from zoo.data.folder import Batch, OnBadImage
from zoo.data.loader import Loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine.meters import Reading

Forward = Callable[[Tensor], Tensor]
Loaders = tuple[Loader[TrainBatches], Loader[ValBatches]]


class Views(Protocol):
    """How a validation looks at an image: the views that the network is given of it, and how they become one."""

    @property
    def name(self) -> str:
        """The name in results, such as ``center224``."""

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits of a batch of ``images``, as the validation loader of these views yields them.

        ``forward`` is the network: (N, 3, h, w) -> logits, in parts where memory is short.
        """


class Result(ABC):
    """The scores of a validation; a task's class is a dataclass with the scores in percent.

    Args:
    - `labels`: the scores by name, each with the word that logs and tables show. The best checkpoint of a run is the
      one with the highest value of the first.
    - `loss`: mean over the images, nats.
    - `count`: number of images that were scored.
    - `skipped`: number of images that could not be read and are in no average.
    - `protocol`: name of the views of the images.
    """

    labels: ClassVar[Mapping[str, str]]
    loss: float
    count: int
    skipped: int
    protocol: str

    def scores(self) -> dict[str, float]:
        """Return the scores by name, percent."""
        return {name: getattr(self, name) for name in self.labels}

    @property
    def score(self) -> float:
        """The score that the best checkpoint is chosen by, percent."""
        return next(iter(self.scores().values()))

    @property
    def expected_as(self) -> str:
        """The name under which an experiment has the score that is expected of these views."""
        return self.protocol

    def record(self) -> dict[str, Any]:
        """Return the numbers of a line of the metrics file, by their published names."""
        return asdict(self)  # type: ignore[call-overload]

    def to_json(self, weights_md5: str | None, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of a result file; a loss that is not finite becomes null (JSON has no NaN)."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {**self.record(), "loss": loss, "weights_md5": weights_md5, "environment": environment}


class Task(ABC):
    """What an experiment trains for; one object for a run.

    Args:
    - `config`: the settings of the experiment.

    A class has ``labels``, those of its `Result`; ``num_counts`` is how many whole numbers the scores are made of, see
    `counts`.
    """

    labels: ClassVar[Mapping[str, str]]
    num_counts: int

    def __init__(self, config: Experiment) -> None:
        self.config = config

    @abstractmethod
    def build_loaders(
        self,
        data: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
        on_bad_image: OnBadImage = "stop",
    ) -> Loaders:
        """Return the loaders of ``data``/train and ``data``/val for one process; DataError for data that do not fit."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss to train with, summed over the images, 0-d; the logits are at least float32.

        It has to be a sum: a step divides it by the images of all processes.
        """

    @abstractmethod
    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the whole numbers that the scores are made of, (num_counts,) int64, for a batch; they are added up.

        Nothing waits for the device.
        """

    @abstractmethod
    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss that a validation reports, summed over the images, 0-d, and the `counts`."""

    @abstractmethod
    def scores(self, reading: Reading) -> dict[str, float]:
        """Return the scores of what a meter has read, by name, percent; NaN where nothing was seen."""

    @property
    @abstractmethod
    def views(self) -> Views:
        """The views of the images in the validations of a training."""

    @abstractmethod
    def result(self, reading: Reading, views: Views) -> Result:
        """Return the scores of a validation with these views."""

    def picture(self, batch: Batch, logits: Tensor) -> Tensor | None:
        """Return a picture (3, h, w), uint8, of what the network makes of the first image; None: there is none."""
        return None

    @abstractmethod
    def next_commands(self, checkpoint: str, data: str) -> Mapping[str, str]:
        """Return the commands that a user may want after training, with what they are for; both paths are quoted."""
