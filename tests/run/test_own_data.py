"""`zoo.train` with users' data sets and modules: bit-identical to folders, exact resume, clear errors."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, random_split
from torchvision.datasets import ImageFolder

import zoo
from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from tests.refusals import refused
from zoo.config.network import NetworkSpec
from zoo.data.map_dataset import Datasets, class_names_of
from zoo.engine.checkpoint import read
from zoo.remat.lean import is_lean

SETTINGS: dict[str, Any] = {
    "optimizer": {"batch_size": 8, "learning_rate": 0.05, "schedule": {"type": "cosine", "mode": "step", "epochs": 2}},
    "input": {"crop_train": 8, "scale_val": 8, "crop_val": 8},
}


class Pictures(Dataset[tuple[Image.Image, int]]):
    """The PIL images of a folder, in its order."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir())
        self._files = sorted(folder.glob("*/*"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file = self._files[index]
        return Image.open(file), self.classes.index(file.parent.name)


class Noise(Dataset[tuple[Tensor, int]]):
    """Tensors with noise from all three global generators. Item ``interrupts_at`` interrupts the second epoch."""

    def __init__(self, count: int = 24, label: int = 1, interrupts_at: int | None = None) -> None:
        self._count = count
        self._label = label
        self._interrupts_at = interrupts_at
        self._num_reads = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self._interrupts_at:
            self._num_reads += 1
            if self._num_reads == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        shift = random.random() + np.random.random()
        return torch.randn(3, 6, 6) + shift + index % 2, index % 2 * self._label


def make_module(num_classes: int = 2) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, num_classes),
    )  # fmt: skip


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_data_set_is_bit_identical_to_image_folder(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=16, num_val=5)
    settings = {**SETTINGS, "input": {**SETTINGS["input"], "color_jitter_train": True}}
    options: dict[str, Any] = {"experiment": settings, "memory": "lean", "epochs": 1}
    of_folder = zoo.train("resnet32_cifar", data, log_dir=tmp_path / "folder", **options)
    sets = Pictures(data / "train"), Pictures(data / "val")
    result = zoo.train("resnet32_cifar", *sets, log_dir=tmp_path / "set", workers=1, **options)
    assert differences(weights_of(of_folder.model), weights_of(result.model)) == []
    assert of_folder.scores == result.scores
    first, second = read(of_folder.checkpoint), read(result.checkpoint)
    assert first["network"] == second["network"]
    assert first["network"]["class_names"] == ["class0", "class1"]
    assert first["config"] == second["config"]
    assert zoo.score(zoo.load_network(result.checkpoint), data).top1 == result.scores["top1"]


def test_custom_module_resumes_exactly(tmp_path: Path) -> None:
    random.seed(1)
    options: dict[str, Any] = {"experiment": SETTINGS, "batch_size": 4}
    whole = zoo.train(make_module(), Noise(), Noise(8), log_dir=tmp_path / "whole", **options)
    assert sorted(whole.scores) == ["top1", "top5"]
    assert whole.best_score is not None
    assert whole.best_score >= whole.scores["top1"]
    random.seed(2)  # the state of the process has no effect
    np.random.seed(2)
    parts = tmp_path / "parts"
    with pytest.raises(zoo.TrainingInterrupted):
        zoo.train(make_module(), Noise(interrupts_at=3), Noise(8), log_dir=parts, **options)
    assert 6 < read(parts / "checkpoint.pth.tar")["position"]["step"] < 12
    module = make_module()
    resumed = zoo.train(module, Noise(), Noise(8), log_dir=parts, resume="auto", workers=2, **options)
    assert resumed.model is module
    assert not module.training
    assert differences(read(whole.checkpoint)["state_dict"], read(resumed.checkpoint)["state_dict"]) == []
    assert whole.scores == resumed.scores
    assert whole.best_weights is not None
    zoo.load_weights(make_module(), whole.best_weights)


def _train_two_epochs(log_dir: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # rank 0's weights are used
    module = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    result = zoo.train(module, Noise(), Noise(8), log_dir=log_dir, experiment=SETTINGS)
    return weights_of(result.model), dict(result.scores)


@pytest.mark.dist
def test_two_processes_train_the_same_network(tmp_path: Path) -> None:
    first, second = run_distributed(_train_two_epochs, 2, tmp_path / "two", group=False)
    alone = _train_two_epochs(tmp_path / "one")
    assert differences(first, second) == []
    assert first[1] == alone[1]
    for key, value in alone[0].items():
        torch.testing.assert_close(first[0][key], value)


class Wrapper(Dataset[Any]):
    """A wrapper of the user's own, such as one that adds a transform."""

    def __init__(self, split: Dataset[Any]) -> None:
        self._split: Any = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Any:
        return self._split[index]


WRAPPERS_OF_SPLITS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda split: split,
    "subset": lambda split: Subset(split, range(8)),
    "own": Wrapper,
}


class Labeled(Noise):
    """Noise whose labels are an attribute, as in torchvision's data sets."""

    def __init__(self, targets: list[int]) -> None:
        super().__init__(len(targets))
        self.targets = targets


def _other_data_on_rank_1(kind: str, log_dir: Path) -> str:
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(0)
    labels = [index % 2 for index in range(24)]
    train: Any = Labeled(labels)
    val: Any = Subset(Labeled(labels), range(8))
    if kind == "split":
        train, val = random_split(Noise(), [16, 8], generator.manual_seed(rank))
    elif kind == "validation of nested split":
        val = Subset(random_split(Noise(), [16, 8], generator.manual_seed(rank))[1], range(4))
    elif kind == "labels":
        train = Labeled(labels[rank:] + labels[:rank])
    elif kind == "order of concatenation":
        parts = [Labeled(labels[:8]), Labeled(labels[1:9])]
        val = ConcatDataset(parts if rank else parts[::-1])
    try:
        zoo.train(make_module(), train, val, log_dir=log_dir, experiment=SETTINGS)
    except zoo.DataError as error:
        return str(error)
    return "trained"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("split", ["train.indices", "val.indices"]),
        ("validation of nested split", ["val.indices"]),
        ("labels", ["train.targets"]),
        ("order of concatenation", ["val.targets"]),
        ("none", []),
    ],
)
def test_other_items_on_another_rank_raise_before_training(kind: str, keys: list[str], tmp_path: Path) -> None:
    first, second = run_distributed(_other_data_on_rank_1, 2, kind, tmp_path / "log", group=False)
    assert first == second
    if not keys:
        assert first == "trained"
        return
    assert "rank 1: " in first
    assert re.findall(r"[a-z]+\.[a-z]+(?= = )", first) == keys
    assert "manual_seed(0)" in first
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("wrap", WRAPPERS_OF_SPLITS.values(), ids=WRAPPERS_OF_SPLITS.keys())
@pytest.mark.parametrize("is_val", [False, True])
def test_resume_with_another_split_raises(wrap: Callable[[Any], Any], is_val: bool, tmp_path: Path) -> None:
    def train(seed: int, folder: str = "log", **options: Any) -> zoo.TrainingResult:
        part, rest = random_split(Noise(), [16, 8], torch.Generator().manual_seed(seed))
        sets = (Noise(), wrap(rest)) if is_val else (wrap(part), Noise(8))
        return zoo.train(make_module(), *sets, log_dir=tmp_path / folder, experiment=SETTINGS, **options)

    first = train(0, epochs=1)
    assert first.best_score is not None
    assert train(0, epochs=1, resume="auto").best_score == first.best_score
    key = "val.indices: '" if is_val else "train.indices: '"
    for epochs in (1, 2):
        refused(zoo.CheckpointError, partial(train, 1, epochs=epochs, resume="auto"), key, "--weights")
    assert train(0, epochs=2, resume="auto").best_epoch is not None
    assert train(1, "anew", epochs=1, weights=str(first.checkpoint)).best_epoch == 0


def test_resume_with_new_validation_set_raises(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_dir": tmp_path, "experiment": SETTINGS}
    zoo.train(make_module(), Noise(), epochs=1, **options)
    train = partial(zoo.train, make_module(), Noise(), Noise(8), epochs=2, resume="auto", **options)
    refused(zoo.CheckpointError, train, "val.images: 'absent' before and 8 now")


def _freeze(module: Any) -> None:
    module[0].eval()


def _freeze_all_but_head(module: nn.Module) -> None:
    module.eval()
    module[-1].train()  # type: ignore[index, operator]


def _freeze_norm_inside(module: Any) -> None:
    module[0][1].eval()


def _override_train(module: Any) -> None:
    """Freeze a part that overrides train(), as torchvision's detectors did."""
    module[0].eval()
    module[0].train = lambda mode=True: module[0]


FREEZERS = [_freeze, _freeze_all_but_head, _freeze_norm_inside, _override_train]


def make_frozen(freeze: Callable[[Any], object]) -> nn.Module:
    *backbone, head = make_module()  # type: ignore[misc]
    module = nn.Sequential(nn.Sequential(*backbone), head)
    freeze(module)
    return module


def modes_of(module: nn.Module) -> dict[str, bool]:
    return {name: each.training for name, each in module.named_modules()}


class Modes(Noise):
    """Noise that notes the modes of a module whenever its first item is read."""

    def __init__(self, module: nn.Module, count: int = 24) -> None:
        super().__init__(count)
        self._module = [module]  # in a list, as attributes may be data sets
        self.seen: list[dict[str, bool]] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 0:
            self.seen.append(modes_of(self._module[0]))
        return super().__getitem__(index)


@pytest.mark.parametrize("freeze", FREEZERS)
@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.5}, {"replicas": 2}], ids=["plain", "ema", "replicas"])
def test_modules_in_evaluation_mode_stay_there(
    freeze: Callable[[Any], object], changes: dict[str, Any], tmp_path: Path
) -> None:
    module = make_frozen(freeze)
    before, own = weights_of(module), modes_of(module)
    data = Modes(module)
    settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], **changes}}
    result = zoo.train(module, data, Noise(8), log_dir=tmp_path, experiment=settings)
    assert [*data.seen[-2:]] == [own, own]  # after a validation, too
    after = weights_of(result.model)
    for name in ("0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["1.weight"], after["1.weight"])
    log = (tmp_path / "training_0.log").read_text()
    num_frozen = sum(not training for training in own.values())
    assert log.count(f"{num_frozen} of {len(own)} modules stay in evaluation mode: ") == 1


def test_network_scored_before_is_trained_as_usual(tmp_path: Path) -> None:
    modules = [make_module(), make_module().eval()]
    for number, module in enumerate(modules):
        zoo.train(module, Noise(), log_dir=tmp_path / str(number), epochs=1, experiment=SETTINGS)
        assert "evaluation mode" not in (tmp_path / str(number) / "training_0.log").read_text()
    assert differences(*map(weights_of, modules)) == []


@pytest.mark.parametrize("given", [*FREEZERS[:2], nn.Module.eval, nn.Module.train])
def test_resumed_run_has_modes_of_checkpoint(given: Callable[[Any], object], tmp_path: Path) -> None:
    options: dict[str, Any] = {"experiment": SETTINGS, "batch_size": 4}
    whole = zoo.train(make_frozen(_freeze), Noise(), log_dir=tmp_path / "whole", **options)
    with pytest.raises(zoo.TrainingInterrupted):
        zoo.train(make_frozen(_freeze), Noise(interrupts_at=3), log_dir=tmp_path / "parts", **options)
    module = make_frozen(given)
    resumed = zoo.train(module, Noise(), log_dir=tmp_path / "parts", resume="auto", **options)
    assert differences(read(whole.checkpoint), read(resumed.checkpoint)) == []
    is_other = given is _freeze_all_but_head
    assert ("mode as in the checkpoint" in (tmp_path / "parts/training_0.log").read_text()) == is_other


def _train_frozen(log_dir: Path) -> dict[str, Tensor]:
    module = make_frozen(_freeze if os.environ["RANK"] == "0" else nn.Module.train)  # rank 0's modes are used
    zoo.train(module, Noise(), Noise(8), log_dir=log_dir, experiment=SETTINGS)
    return weights_of(module)


@pytest.mark.dist
def test_two_processes_keep_frozen_statistics(tmp_path: Path) -> None:
    first, second = run_distributed(_train_frozen, 2, tmp_path, group=False)
    assert differences(first, second) == []
    assert first["0.1.num_batches_tracked"] == 0
    assert torch.equal(first["0.1.running_mean"], torch.zeros(4))


class Partial(nn.Module):
    """A network with a second head that some forward passes in training leave out."""

    def __init__(self, is_used: Callable[[int], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.other = nn.Linear(108, 2), nn.Linear(108, 2)
        num_passes = 0  # not an attribute, for which replicas raise an error

        def uses_other(is_training: bool) -> bool:
            nonlocal num_passes
            num_passes += is_training
            return is_used(num_passes)

        self._uses_other = uses_other

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x) + self.other(x) if self._uses_other(self.training) else self.head(x)


def _train_partial(kind: str, log_dir: Path) -> str:
    rank = int(os.environ.get("RANK", 0))
    module = Partial(
        {
            "sometimes on one rank": lambda count: rank == 0 or count != 2,
            "sometimes": lambda count: count != 2,
            "last micro-batch": lambda count: count != 4,
        }.get(kind, lambda _: False)
    )
    options: dict[str, Any] = {"replicas": 2 if kind == "replicas" else None}
    if kind == "frozen":
        module.other.requires_grad_(False)
    if kind == "deep":
        module = nn.Sequential(module)  # type: ignore[assignment]
    accumulate_steps = 2 if kind == "last micro-batch" else 1
    settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "accumulate_steps": accumulate_steps}}
    try:
        zoo.train(module, Noise(), Noise(8), log_dir=log_dir, experiment=settings, **options)
    except zoo.ConfigError as error:
        assert not (log_dir / "checkpoint.pth.tar").exists()
        return str(error)
    except RuntimeError:  # the connection to the other rank is closed
        return "torch"
    return "trained"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "step", "ranks"),
    [("never", 1, [0, 1]), ("deep", 1, [0, 1]), ("sometimes", 2, [0, 1]), ("sometimes on one rank", 2, [1]),
     ("last micro-batch", 2, [0, 1])],
)  # fmt: skip
def test_parameters_without_gradient_are_named(kind: str, step: int, ranks: list[int], tmp_path: Path) -> None:
    for rank, end in enumerate(run_distributed(_train_partial, 2, kind, tmp_path / "log", group=False)):
        if rank not in ranks:
            assert end == "torch"
            continue
        prefix = "0." if kind == "deep" else ""
        names = f"{prefix}other.weight, {prefix}other.bias"
        assert f"2 of 4 parameters got no gradient on rank {rank} in step {step} ({names})" in end
        assert "requires_grad_(False)" in end
    assert _train_partial(kind, tmp_path / "alone") == "trained"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["frozen", "replicas"])
def test_frozen_parameters_and_replicas_need_no_gradient(kind: str, tmp_path: Path) -> None:
    assert run_distributed(_train_partial, 2, kind, tmp_path, group=False) == ["trained"] * 2


def test_run_without_validation_has_checkpoint_and_no_scores(tmp_path: Path) -> None:
    result = zoo.train(make_module(), Noise(), log_dir=tmp_path, epochs=1, batch_size=12, experiment=SETTINGS)
    assert (result.scores, result.best_score, result.best_epoch, result.best_weights) == ({}, None, None, None)
    saved = read(result.checkpoint)
    assert saved["position"]["step"] == 2
    assert saved["network"] is None
    assert saved["class_names"] is None
    longer = zoo.train(
        make_module(), Noise(), log_dir=tmp_path, epochs=2, batch_size=12, experiment=SETTINGS, resume="auto"
    )
    assert read(longer.checkpoint)["position"]["step"] == 4
    assert "rewritten: " not in (tmp_path / "training_0.log").read_text()


def test_lean_module_is_bit_identical(tmp_path: Path) -> None:
    modules = [make_module(), make_module()]
    for module, memory in zip(modules, (None, "lean"), strict=True):
        zoo.train(module, Noise(), log_dir=tmp_path / str(memory), epochs=1, memory=memory, experiment=SETTINGS)
    assert [is_lean(module) for module in modules] == [False, True]
    assert differences(*map(weights_of, modules)) == []


def test_checkpoint_describes_unchanged_zoo_module(tmp_path: Path) -> None:
    result = zoo.train(zoo.get("resnet32_cifar", num_classes=3), Noise(16), log_dir=tmp_path / "a", epochs=1)
    loaded = zoo.get(result.checkpoint)
    assert differences(weights_of(loaded), weights_of(result.model)) == []
    changed: Any = zoo.get("resnet32_cifar", num_classes=3)
    changed.classifier.fc = nn.Sequential(nn.Dropout(0.5), changed.classifier.fc)
    result = zoo.train(changed, Noise(16), log_dir=tmp_path / "b", epochs=1)
    assert read(result.checkpoint)["network"] is None


def test_moving_average_is_returned_if_there_is_one(tmp_path: Path) -> None:
    settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "ema_decay": 0.5}}
    module = make_module()
    result = zoo.train(module, Noise(), log_dir=tmp_path, experiment=settings)
    saved = read(result.checkpoint)
    assert differences(weights_of(result.model), saved["ema"]) == []
    assert differences(weights_of(module), saved["state_dict"]) == []
    assert differences(saved["ema"], saved["state_dict"])


def test_settings_may_be_mapping_or_experiment(tmp_path: Path) -> None:
    spec = NetworkSpec(arch="resnet32_cifar", num_classes=2, norm="inplace")
    result = zoo.train(spec, Noise(), log_dir=tmp_path, experiment="resnet32_cifar10_short", epochs=1, batch_size=12)
    config = read(result.checkpoint)["config"]
    bundled = zoo.config.parse.load_experiment("resnet32_cifar10_short")
    assert (config["network"]["norm"], config["network"]["num_classes"]) == ("inplace", 2)
    assert config["optimizer"]["learning_rate"] == bundled.optimizer.learning_rate
    assert (config["optimizer"]["batch_size"], config["optimizer"]["schedule"]["epochs"]) == (12, 1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


class Items(Dataset[Any]):
    def __init__(self, item: Any, classes: Any = ()) -> None:
        self._item = item
        self.classes = classes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._item, Exception):
            raise self._item
        return self._item


class Sizes(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 6 + index % 2, 6), 0


X = torch.zeros(3, 6, 6)
NAMED = Items((X, 0), ["cat", "dog"])


@pytest.mark.parametrize(
    ("network", "data", "names"),
    [
        (make_module(), (Stream(),), ["Stream: "]),
        (make_module(), (3,), ["int: "]),
        (make_module(), (Noise(label=2),), [" of Noise: ", "label is 2", "2 outputs"]),
        (make_module(), (Noise(), Noise(label=-1)), [" of Noise: ", "label is -1"]),
        (make_module(), (Items((X, -1)),), ["item 0 of Items: ", "label is -1"]),
        (make_module(), (Items((X.double(), 0)),), ["item 0 of Items: ", "torch.float64"]),
        (make_module(), (Sizes(),), ["of Sizes: ", "(3, 6, 6)", "(3, 7, 6)"]),
        (make_module(), (Items(X),), ["item 0 of Items: ", "tensor", "pair ("]),
        (make_module(), (Items((X, 0.5)),), ["item 0 of Items: ", "label is 0.5"]),
        (make_module(), (Items(("a.png", 0)),), ["a str"]),
        (make_module(), (Items(OSError("damaged")),), ["item 0 of Items: ", "(damaged)"]),
        (make_module(), (NAMED, Items((X, 0), ["dog", "cat"])), ["dog, cat", "cat, dog"]),
        (make_module(), (Items((X, 0), ["a", "b", "c"]),), ["Items: ", "3 classes", "2 outputs"]),
        ("resnet32_cifar", (Noise(),), ["Noise: ", "num_classes=N"]),
        ("resnet32_cifar10_short", ("data", Noise()), ["val is given"]),
        ("quickstart_scenes", (Noise(),), ["Noise: deeplab_"]),
        (nn.Conv2d(3, 2, 1), (Noise(),), ["(2, 2, 6, 6)", "(3, 6, 6)"]),
    ],
)
def test_unusable_data_and_networks_raise(
    network: Any, data: tuple[Any, ...], names: list[str], tmp_path: Path
) -> None:
    refused(zoo.ZooError, lambda: zoo.train(network, *data, log_dir=tmp_path, epochs=1, batch_size=4), *names)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "subset": lambda data: Subset(data, range(len(data))),
    "split": lambda data: random_split(data, [0.5, 0.5])[1],
    "split of subset": lambda data: random_split(Subset(data, range(4)), [3, 1])[0],
    "concatenation": lambda data: ConcatDataset([data, Subset(data, [0])]),
    "subset of concatenation": lambda data: Subset(ConcatDataset([data, data]), [9, 2]),
    "concatenation with unnamed part": lambda data: ConcatDataset([Noise(), data]),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("wrapped", ["train", "val", "both"])
def test_wrapped_data_sets_name_their_classes(wrap: Callable[[Any], Any], wrapped: str) -> None:
    of_train: Callable[[Any], Any] = wrap if wrapped != "val" else lambda data: data
    of_val: Callable[[Any], Any] = wrap if wrapped != "train" else lambda data: data
    assert class_names_of(of_train(NAMED)) == ["cat", "dog"]
    Datasets(of_train(NAMED), of_val(Items((X, 1), ["cat", "dog"])))
    datasets = partial(Datasets, of_train(NAMED), of_val(Items((X, 0), ["dog", "cat"])))
    refused(zoo.DataError, datasets, "classes dog, cat", "data cat, dog")


def test_attribute_classes_of_wrapper_is_used() -> None:
    subset: Any = Subset(NAMED, [0])
    subset.classes = ["a", "b"]
    assert class_names_of(subset) == ["a", "b"]
    assert class_names_of(Subset(Noise(), [0])) == []


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_val", [False, True])
def test_concatenation_of_two_numberings_raises(depth: int, is_val: bool) -> None:
    both: Any = ConcatDataset([NAMED, Items((X, 0), ["dog", "cat"])])
    for _ in range(depth):
        both = Subset(both, range(8))
    datasets = partial(Datasets, NAMED, both) if is_val else partial(Datasets, both)
    refused(zoo.DataError, datasets, "ConcatDataset: ", "cat, dog and dog, cat", "target_transform")


def test_names_of_split_image_folder_reach_checkpoint(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=16, num_val=4)
    train, val = random_split(ImageFolder(data / "train"), [12, 4], torch.Generator().manual_seed(0))
    result = zoo.train("resnet32_cifar", train, val, log_dir=tmp_path / "log", epochs=1, experiment=SETTINGS)
    saved = read(result.checkpoint)
    assert saved["class_names"] == saved["network"]["class_names"] == ["class0", "class1"]
    (data / "val/class0").rename(data / "val/other")
    resume = partial(zoo.train, "resnet32_cifar", train, log_dir=tmp_path / "other", epochs=1)
    refused(zoo.DataError, lambda: resume(ImageFolder(data / "val")), "class1, other", "class0, class1")


def test_contradictory_experiment_and_memory_raise(tmp_path: Path) -> None:
    train = partial(zoo.train, log_dir=tmp_path)
    refused(zoo.ConfigError, lambda: train("resnet32_cifar10_short", Noise(), experiment=SETTINGS), "two experiments")
    refused(zoo.ConfigError, lambda: train(make_module(), Noise(), memory="checkpoint"), "memory", "'lean'")
