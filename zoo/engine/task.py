"""The contract of a task: everything in which one kind of training differs from another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from zoo.config import Experiment
from zoo.data.loader import Loader
from zoo.data.location import DataPath
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine.meters import Reading

Forward = Callable[[Tensor], Tensor]


class ScoringProtocol(Protocol):
    """How images are scored: the views that the network is given of each, and how their logits become one."""

    @property
    def name(self) -> str:
        """The name in results, such as ``center224``."""

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits of a batch of ``images``, as the validation loader of this protocol yields them.

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
    - `protocol`: name of the way in which the images were scored.
    - `val`: the images that there are, of which a limit may have left some out: their number, that of their classes,
      and a digest of their names; None for the validations of a training, whose log has it once.
    """

    labels: ClassVar[Mapping[str, str]]
    loss: float
    count: int
    skipped: int
    protocol: str
    val: Mapping[str, Any] | None

    def scores(self) -> dict[str, float]:
        """Return the scores by name, percent."""
        return {name: getattr(self, name) for name in self.labels}

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """Those of ``labels`` that logs and tables show; files for programs have all scores."""
        return self.labels

    def standard_errors(self) -> dict[str, float]:
        """Return the standard errors by the names of the scores, in points; none for scores that have none."""
        return {}

    @property
    def score(self) -> float:
        """The score that the best checkpoint is chosen by, percent."""
        return next(iter(self.scores().values()))

    @property
    def expected_as(self) -> str:
        """The name under which an experiment has the score that is expected by this protocol."""
        return self.protocol

    def record(self) -> dict[str, Any]:
        """Return the numbers of a line of the metrics file, by their published names."""
        numbers: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        del numbers["val"]
        return numbers

    def to_json(self, weights_md5: str | None, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of a result file; a loss that is not finite becomes null (JSON has no NaN)."""
        return {
            **self.record(),
            "loss": self.loss if math.isfinite(self.loss) else None,
            "standard_errors": self.standard_errors(),
            "val": self.val,
            "weights_md5": weights_md5,
            "environment": environment,
        }


class Task(ABC):
    """What an experiment trains for; one object for a run.

    Args:
    - `config`: the settings of the experiment.

    A class has ``labels``, those of its `Result`; ``num_counts`` is how many whole numbers the scores are made of, see
    `counts`. ``protocols`` are those that scores are published for, by name.
    """

    labels: ClassVar[Mapping[str, str]]
    protocols: ClassVar[Mapping[str, ScoringProtocol]]
    num_counts: int

    def __init__(self, config: Experiment) -> None:
        self.config = config

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """Those of ``labels`` that logs and tables show; files for programs have all scores."""
        return self.labels

    @abstractmethod
    def build_train_loader(self, data: DataPath, **share: Any) -> Loader[TrainBatches]:
        """Return the loader of the training images of one process; DataError for data that do not fit.

        ``share``: rank, world_size, workers, pin_memory and on_bad_image, as in `zoo.data.loader`.
        """

    @abstractmethod
    def build_val_loader(
        self,
        data: DataPath,
        protocol: Any,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        world_size: int = 1,
        **share: Any,
    ) -> Loader[ValBatches]:
        """Return the loader of the validation images of one process, for one of the task's protocols.

        ``batch_size``: images at once, if the task can choose; default the process's share of a training batch.
        ``limit``: see `zoo.data.sampler.ValBatches`.
        """

    def trained_network(self, model: nn.Module) -> nn.Module:
        """Return what a step of training calls with its images, for logits that `loss` and `counts` can read.

        It is the ``model`` itself, or a module that has it as its only part.
        """
        return model

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
    def own_protocol(self) -> ScoringProtocol:
        """The protocol of the validations of a training."""

    @abstractmethod
    def result(self, reading: Reading, protocol: str) -> Result:
        """Return the scores of a validation by the protocol of this name; DataError if there is nothing to score."""

    def class_maps(self, logits: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return maps of classes, (H, W) each, to be shown over the first image of a batch; none if it has only one."""
        return {}

    @abstractmethod
    def next_commands(self, checkpoint: str, data: str) -> Mapping[str, str]:
        """Return the commands that a user may want after training, with what they are for; both paths are quoted."""
