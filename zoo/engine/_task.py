"""Interface of a task: everything that differs between classification and segmentation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from zoo.config.experiment import Experiment
from zoo.data.loader import Loader, LoaderOptions
from zoo.data.map_dataset import Datasets
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.data.sources.location import DataPath
from zoo.engine._meters import Reading

Forward = Callable[[Tensor], Tensor]


class EvalProtocol(Protocol):
    """Evaluation protocol: the views of an image that the network sees, and the combination of their logits."""

    @property
    def name(self) -> str:
        """Name in results, such as ``center224``."""

    def logits(self, forward: Forward, images: Tensor) -> Tensor:
        """Return the logits of a batch of ``images`` from the validation loader of this protocol.

        ``forward`` is the network: (N, 3, h, w) -> logits.
        """


class Result(ABC):
    """Result of a validation; subclasses are dataclasses with a field per score, in percent.

    Args:
    - `labels`: label of each score in logs and tables, by name. The first score selects the best checkpoint.
    - `loss`: mean over the images, nats.
    - `count`: number of images.
    - `protocol`: name of the scoring protocol.
    - `val`: the full validation set, even if a limit scores a subset: number of images and classes, and a digest of the
      names. None during training, where the log has it once.
    """

    labels: ClassVar[Mapping[str, str]]
    loss: float
    count: int
    protocol: str
    val: Mapping[str, Any] | None

    def scores(self) -> dict[str, float]:
        """Return the scores by name, percent."""
        return {name: getattr(self, name) for name in self.labels}

    def standard_errors(self) -> dict[str, float | None]:
        """Return standard errors by the names of the scores, in percentage points; None where one is unknown."""
        return {}

    def class_counts(self) -> list[int] | None:
        """Return the number of labels of each class; None if the scores do not depend on them."""
        return None

    @property
    def score(self) -> float:
        """The score that selects the best checkpoint, percent."""
        return next(iter(self.scores().values()))

    @property
    def expected_as(self) -> str:
        """The key of this protocol in the ``expected`` block of an experiment."""
        return self.protocol

    def record(self) -> dict[str, Any]:
        """Return the fields of a line of the metrics file."""
        numbers: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        del numbers["val"]
        return numbers

    def to_json(self, weights_md5: str | None, environment: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a result file. A loss that is not finite becomes null, because JSON has no NaN."""
        return {
            **self.record(),
            "loss": self.loss if math.isfinite(self.loss) else None,
            "standard_errors": self.standard_errors(),
            "val": self.val,
            "weights_md5": weights_md5,
            "environment": environment,
        }


class Task(ABC):
    """Task of an experiment: loaders, loss and scores; one object per run.

    Args:
    - `config`: the settings of the experiment.

    Class attributes: ``labels``, as in its `Result`; ``num_counts``, the number of integers that `counts` returns;
    ``protocols``, the protocols with published scores, by name.
    """

    labels: ClassVar[Mapping[str, str]]
    protocols: ClassVar[Mapping[str, EvalProtocol]]
    num_counts: int

    def __init__(self, config: Experiment) -> None:
        self.config = config

    @property
    def shown_labels(self) -> Mapping[str, str]:
        """The ``labels`` that logs and tables show; JSON files have all scores."""
        return self.labels

    @abstractmethod
    def build_train_loader(self, data: DataPath | Datasets, options: LoaderOptions) -> Loader[TrainBatches]:
        """Return this rank's loader of training images; DataError for unsuitable data."""

    @abstractmethod
    def build_val_loader(
        self,
        data: DataPath | Datasets,
        protocol: Any,
        options: LoaderOptions,
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        split: str = "val",
    ) -> Loader[ValBatches]:
        """Return this rank's loader of validation images for one of the task's protocols.

        ``batch_size``: images per batch, if the task can choose; default: the rank's share of a training batch.
        ``limit``: see `zoo.data.sampler.ValBatches`. ``split``: the folder of images, if the task can choose.
        """

    def trained_network(self, model: nn.Module) -> nn.Module:
        """Return the module that a training step calls: ``model``, or a module around it, with logits for `loss`."""
        return model

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss, summed over the images, 0-d; the logits are at least float32.

        It has to be a sum: a step divides it by the global number of images.
        """

    @abstractmethod
    def counts(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the integers from which scores are computed, (num_counts,) int64, additive over batches.

        Must not wait for the device.
        """

    @abstractmethod
    def scored(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the validation loss, summed over the images, 0-d, and the `counts`."""

    @abstractmethod
    def scores(self, reading: Reading) -> dict[str, float]:
        """Return the scores by name from a meter's reading, percent; NaN without images."""

    def class_counts(self, reading: Reading) -> list[int] | None:
        """Return the number of labels of each class in a meter's reading; None if `counts` do not have it."""
        return None

    @property
    @abstractmethod
    def own_protocol(self) -> EvalProtocol:
        """The protocol of validations during training."""

    @abstractmethod
    def result(self, reading: Reading, protocol: str) -> Result:
        """Return the result of a validation by the named protocol; DataError if there is nothing to score."""
