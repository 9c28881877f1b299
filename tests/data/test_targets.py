"""Labels are known without reading an item, weights follow them, and an epoch is drawn as torch's sampler draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, WeightedRandomSampler

from tests.data.sample_images import make_folder
from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, differences, make_config, run
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.data.loader import LoaderOptions, build_train_loader
from zoo.data.map_dataset import Datasets
from zoo.data.seeding import mixed_seed
from zoo.data.targets import class_weights, targets_of, weighted_order
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.errors import ConfigError, DataError
from zoo.tasks import task_of

COUNTS = [20, 4, 1]  # images by class
TARGETS = np.repeat(np.arange(3), COUNTS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split, counts in (("train", COUNTS), ("val", [2, 2, 2])):
        make_folder(folder / split, {f"class{target}": count for target, count in enumerate(counts)}, 12, 12)
    return folder


def _config(**changes: Any) -> Any:
    return make_config(network={"classes": 3}, **changes)


class _Items(Dataset[Any]):
    def __init__(self, labels: Any, attribute: str | None = "targets", values: Any = None) -> None:
        self._own = [int(label) for label in labels]
        if attribute is not None:
            setattr(self, attribute, self._own if values is None else values)

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 8, 8), self._own[index]


LABELS = [2, 0, 1, 1]
KNOWN: dict[str, Any] = {
    "targets": _Items(LABELS),
    "labels as array": _Items(LABELS, "labels", np.array(LABELS)),
    "labels as tensor": _Items(LABELS, "_labels", torch.tensor(LABELS)),
    "samples": _Items(LABELS, "samples", [("file", label) for label in LABELS]),
    "subset": Subset(_Items([0, 1, 2, 1, 0]), [2, 0, 1, 3]),
    "concatenation": ConcatDataset([_Items([2, 0]), Subset(_Items([1, 0, 1]), [0, 2])]),
    "tensors": TensorDataset(torch.zeros(4, 3, 2, 2), torch.tensor(LABELS)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_labels_are_known_without_items(name: str) -> None:
    targets = targets_of(KNOWN[name])
    assert targets is not None
    assert targets.tolist() == LABELS


class _Transformed(_Items):
    target_transform = abs


@pytest.mark.parametrize(
    "dataset",
    [
        _Items(LABELS, None),
        _Items(LABELS, "targets", [0.5] * 4),
        _Items(LABELS, "targets", LABELS[:3]),
        _Items(LABELS, "targets", [[1, 0]] * 4),
        _Transformed(LABELS),
        ConcatDataset([_Items(LABELS), _Items(LABELS, None)]),
    ],
)
def test_unknown_labels_raise_where_they_are_needed(dataset: Any) -> None:
    assert targets_of(dataset) is None
    config = _config(input={"sampling_train": "balanced"})
    refused(DataError, lambda: build_train_loader(Datasets(dataset), config), "labels", "targets")


def test_wrong_attribute_raises_when_item_is_read() -> None:
    config = _config(input={"sampling_train": "balanced"}, optimizer={"batch_size": 4})
    loader = build_train_loader(Datasets(_Items(LABELS, "targets", [1, 2, 0, 0])), config)
    refused(DataError, lambda: list(loader), " of _Items: ", "label is ", "attribute")


def test_balanced_weights_are_inverse_counts_of_mean_one() -> None:
    weights = class_weights("balanced", lambda: TARGETS, 4)
    assert weights.tolist() == pytest.approx([25 / 3 / 20, 25 / 3 / 4, 25 / 3, 0])
    assert weights[torch.from_numpy(TARGETS)].mean().item() == pytest.approx(1)
    assert class_weights([1, 0.5], lambda: TARGETS, 2).tolist() == [1, 0.5]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("setting", ["balanced", [1.0, 2.0, 0.5]])
def test_loss_is_weighted_cross_entropy_over_number_of_images(setting: Any, smoothing: float, data: Path) -> None:
    config = _config(regularization={"class_weights": setting}, optimizer={"label_smoothing": smoothing})
    task = task_of(config)
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([0, 2, 1, 0, 0, 1])
    task.build_train_loader(data, LoaderOptions())
    loss = task.loss(logits, targets)
    weights = class_weights(setting, lambda: TARGETS, 3).double()
    shares = F.one_hot(targets, 3) * (1 - smoothing) + smoothing / 3
    expected = -(shares * weights * logits.log_softmax(1)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(task.scored(logits, targets)[0], F.cross_entropy(logits, targets, reduction="sum"))


@pytest.mark.parametrize("setting", ["balanced", [1, 10.0, 0]])
def test_epochs_are_drawn_as_by_torchs_sampler(setting: Any, data: Path) -> None:
    config = _config(input={"sampling_train": setting}, optimizer={"batch_size": 4})
    batches = build_train_loader(data, config).batch_sampler
    of_class = [1 / count for count in COUNTS] if setting == "balanced" else setting
    weights = [of_class[target] for target in TARGETS]
    for epoch in range(3):
        batches.set_epoch(epoch)
        generator = torch.Generator().manual_seed(mixed_seed(config.seed, epoch))
        expected = list(WeightedRandomSampler(weights, len(TARGETS), generator=generator))
        assert [index for batch in batches for _, index in batch] == expected
        batches.set_epoch(epoch)
        batches.skip_to(2)
        assert [index for batch in batches for _, index in batch] == expected[8:]


def test_balanced_sampling_draws_each_class_equally_often() -> None:
    draw = weighted_order("balanced", np.repeat(np.arange(3), [9000, 900, 100]), 3, "data")
    drawn = draw(torch.Generator().manual_seed(0))
    counts = np.bincount(np.repeat(np.arange(3), [9000, 900, 100])[drawn])
    assert counts.sum() == 10_000
    assert np.abs(counts - 10_000 / 3).max() < 4 * np.sqrt(10_000 * 2 / 9)  # four standard deviations


def test_data_without_any_class_raises(data: Path) -> None:
    config = make_config(network={"classes": 4}, input={"sampling_train": [0, 0, 0, 1]})
    refused(DataError, lambda: build_train_loader(data, config), " 3")


WEIGHTED = {"input": {"sampling_train": "balanced"}, "regularization": {"class_weights": "balanced"}}


def _train(config: Any, data: Path, folder: Path) -> tuple[Any, ...]:
    run(config, data, folder, log := MemoryLog())
    return log.numbers, log.digests


def test_resumed_run_is_bit_identical_to_uninterrupted_run(data: Path, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(metrics: Any) -> None:
        if metrics.step == 5:
            raise Stopped

    config = _config(checkpoint={"every_steps": 2}, **WEIGHTED)
    expected = _train(config, data, tmp_path / "straight")
    with pytest.raises(Stopped):
        run(config, data, tmp_path / "stopped", MemoryLog(stop))
    run(config, data, tmp_path / "stopped", log := MemoryLog(), resume="auto")
    assert log.numbers == expected[0][4:]
    assert differences(read(tmp_path / "straight" / CHECKPOINT), read(tmp_path / "stopped" / CHECKPOINT)) == []


@pytest.mark.dist
def test_any_number_of_processes_draws_same_images(data: Path, tmp_path: Path) -> None:
    config = _config(optimizer={"replicas": 2}, **WEIGHTED)
    expected = _train(config, data, tmp_path / "one")
    assert len(expected[1]) == 3
    assert run_distributed(_train, 2, config, data, tmp_path / "two") == [expected] * 2


BALANCED = {"class_weights": "balanced"}
DEEPLAB = {"arch": "deeplab_resnet18"}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"regularization": {**BALANCED, "mixup": 0.2}}, ["regularization.class_weights", "mixup"]),
        ({"regularization": {**BALANCED, "cutmix": 1}}, ["regularization.class_weights", "cutmix"]),
        ({"regularization": {**BALANCED, "loss": "bce"}}, ["regularization.class_weights", "cross_entropy"]),
        ({"regularization": {"class_weights": [1, 2]}}, ["regularization.class_weights", "1000 classes, not 2"]),
        ({"regularization": {"class_weights": [-1.0] * 1000}}, ["regularization.class_weights"]),
        ({"input": {"sampling_train": [1, 2]}}, ["input.sampling_train", "1000 classes, not 2"]),
        ({"input": {"sampling_train": "equal"}}, ["input.sampling_train"]),
        ({"input": {"sampling_train": [0.0] * 1000}}, ["input.sampling_train", "above 0"]),
        ({"input": {"sampling_train": "balanced", "shuffle_shards": 2}}, ["input.sampling_train", "shuffle_shards"]),
        ({"network": DEEPLAB, "input": {"sampling_train": "balanced"}}, ["input.sampling_train", "segmentation"]),
        ({"network": DEEPLAB, "regularization": BALANCED}, ["regularization.class_weights", "segmentation"]),
    ],
)
def test_wrong_settings_raise(content: dict[str, Any], names: list[str]) -> None:
    refused(ConfigError, lambda: parse_experiment(content, "x.json"), *names)
