"""`zoo.train` with users' data sets and modules: bit-identical to folders, exact resume, clear errors."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, random_split
from torchvision.datasets import ImageFolder

import zoo
from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from tests.refusals import refused
from zoo.config.network import NetworkSpec
from zoo.data.map_dataset import Datasets, class_names_of
from zoo.engine._checkpoint import read
from zoo.remat._lean import is_lean

OPTIMIZER = {"batch_size": 8, "learning_rate": 0.05, "schedule": {"type": "cosine", "mode": "step", "epochs": 2}}
SETTINGS: dict[str, Any] = {"optimizer": OPTIMIZER, "input": {"crop_train": 8, "scale_val": 8, "crop_val": 8}}


class Items(Dataset[Any]):
    """A data set whose items a function computes from their index; keywords are its attributes."""

    def __init__(self, compute: Callable[[int], Any], count: int = 8, **attributes: Any) -> None:
        self._compute, self._count = compute, count
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._compute(index)


def compute_noise(index: int, label: int = 1) -> tuple[Tensor, int]:
    """Return a tensor with noise from all three global generators."""
    shift = random.random() + np.random.random()
    return torch.randn(3, 6, 6) + shift + index % 2, index % 2 * label


def make_noise(count: int = 24, label: int = 1, **attributes: Any) -> Items:
    return Items(partial(compute_noise, label=label), count, **attributes)


def interrupting_noise() -> Items:
    """Return noise that interrupts the second epoch."""
    reads: list[int] = []

    def compute(index: int) -> tuple[Tensor, int]:
        reads.append(index)
        if index == 3 and reads.count(3) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_noise(index)

    return Items(compute, 24)


def make_module() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def train(module: Any, data: Any, val: Any = None, *, optimizer: Any = None, **options: Any) -> zoo.TrainingResult:
    """Train by `SETTINGS` with other keys of the optimizer."""
    settings = {**SETTINGS, "optimizer": {**OPTIMIZER, **(optimizer or {})}}
    return zoo.train(module, data, val, experiment=settings, **options)


def log_of(folder: Path) -> str:
    return (folder / "training_0.log").read_text()


@pytest.mark.usefixtures("small_networks")
def test_data_set_is_bit_identical_to_image_folder(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=16, num_val=5)
    settings = {**SETTINGS, "input": {**SETTINGS["input"], "color_jitter_train": True}}
    options: dict[str, Any] = {"experiment": settings, "memory": "lean", "epochs": 1}
    of_folder = zoo.train("resnet32_cifar", data, log_dir=tmp_path / "folder", **options)
    sets = ImageFolder(data / "train"), ImageFolder(data / "val")
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
    whole = train(make_module(), make_noise(), make_noise(8), log_dir=tmp_path / "whole", batch_size=4)
    assert sorted(whole.scores) == ["top1", "top5"]
    assert whole.best_score is not None
    assert whole.best_score >= whole.scores["top1"]
    random.seed(2)  # the state of the process has no effect
    np.random.seed(2)
    options: dict[str, Any] = {"log_dir": tmp_path / "parts", "batch_size": 4}
    with pytest.raises(zoo.TrainingInterrupted):
        train(make_module(), interrupting_noise(), make_noise(8), **options)
    assert 6 < read(tmp_path / "parts" / "checkpoint.pth.tar")["position"]["step"] < 12
    module = make_module()
    resumed = train(module, make_noise(), make_noise(8), resume="auto", workers=2, **options)
    assert resumed.model is module
    assert not module.training
    assert differences(read(whole.checkpoint)["state_dict"], read(resumed.checkpoint)["state_dict"]) == []
    assert whole.scores == resumed.scores
    assert whole.best_weights is not None
    zoo.load_weights(make_module(), whole.best_weights)


# Other items than before, and on another rank

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda split: split,
    "subset": lambda split: Subset(split, range(8)),
    "own": lambda split: Items(split.__getitem__, len(split), split=split),
}


def split_noise(seed: int) -> list[Any]:
    return random_split(make_noise(), [16, 8], torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("is_val", [False, True])
def test_resume_with_another_split_raises(wrap: Callable[[Any], Any], is_val: bool, tmp_path: Path) -> None:
    def run(seed: int, folder: str = "log", **options: Any) -> zoo.TrainingResult:
        part, rest = split_noise(seed)
        sets = (make_noise(), wrap(rest)) if is_val else (wrap(part), make_noise(8))
        return train(make_module(), *sets, log_dir=tmp_path / folder, **options)

    first = run(0, epochs=1)
    key = "val.indices: '" if is_val else "train.indices: '"
    for epochs in (1, 2):
        refused(zoo.CheckpointError, partial(run, 1, epochs=epochs, resume="auto"), key, "--weights")
    assert run(0, epochs=1, resume="auto").best_score == first.best_score is not None
    if wrap is WRAPPERS["bare"]:
        assert run(0, epochs=2, resume="auto").best_epoch is not None
        assert run(1, "anew", epochs=1, weights=str(first.checkpoint)).best_epoch == 0


def test_resume_with_new_validation_set_raises(tmp_path: Path) -> None:
    train(make_module(), make_noise(), log_dir=tmp_path, epochs=1)
    resume = partial(train, make_module(), make_noise(), make_noise(8), log_dir=tmp_path, epochs=2, resume="auto")
    refused(zoo.CheckpointError, resume, "val.images: 'absent' before and 8 now")


def _other_data_on_rank_1(kind: str, log_dir: Path) -> str:
    rank = int(os.environ["RANK"])
    labels = [index % 2 for index in range(24)]
    data, val = make_noise(targets=labels), Subset(make_noise(targets=labels), range(8))
    parts = [make_noise(8, targets=labels[:8]), make_noise(8, targets=labels[1:9])]
    data, val = {
        "split": lambda: split_noise(rank),
        "validation of nested split": lambda: (data, Subset(split_noise(rank)[1], range(4))),
        "labels": lambda: (make_noise(targets=labels[rank:] + labels[:rank]), val),
        "order of concatenation": lambda: (data, ConcatDataset(parts if rank else parts[::-1])),
        "none": lambda: (data, val),
    }[kind]()
    try:
        train(make_module(), data, val, log_dir=log_dir)
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


# Frozen parts


def _freeze(module: Any) -> None:
    module[0].eval()


def _freeze_all_but_head(module: Any) -> None:
    module.eval()
    module[-1].train()


def _freeze_norm_inside(module: Any) -> None:
    module[0][1].eval()


def _override_train(module: Any) -> None:
    """Freeze a part that overrides train(), as torchvision's detectors did."""
    module[0].eval()
    module[0].train = lambda mode=True: module[0]


def make_frozen(freeze: Callable[[Any], object]) -> nn.Module:
    *backbone, head = make_module()  # type: ignore[misc]
    module = nn.Sequential(nn.Sequential(*backbone), head)
    freeze(module)
    return module


@pytest.mark.parametrize(
    ("freeze", "optimizer"),
    [
        *((freeze, {}) for freeze in (_freeze, _freeze_all_but_head, _freeze_norm_inside, _override_train)),
        *((_freeze_all_but_head, changes) for changes in ({"ema_decay": 0.5}, {"replicas": 2})),
    ],
)
def test_modules_in_evaluation_mode_stay_there(
    freeze: Callable[[Any], object], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    module, seen = make_frozen(freeze), []

    def modes() -> dict[str, bool]:
        return {name: each.training for name, each in module.named_modules()}

    def compute(index: int) -> tuple[Tensor, int]:
        if index == 0:
            seen.append(modes())
        return compute_noise(index)

    before, own = weights_of(module), modes()
    result = train(module, Items(compute, 24), make_noise(8), optimizer=optimizer, log_dir=tmp_path)
    assert seen[-2:] == [own, own]  # after a validation, too
    after = weights_of(result.model)
    for name in ("0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["1.weight"], after["1.weight"])
    num_frozen = sum(not training for training in own.values())
    assert log_of(tmp_path).count(f"{num_frozen} of {len(own)} modules stay in evaluation mode: ") == 1


def test_network_scored_before_is_trained_as_usual(tmp_path: Path) -> None:
    modules = [make_module(), make_module().eval()]
    for number, module in enumerate(modules):
        train(module, make_noise(), log_dir=tmp_path / str(number), epochs=1)
        assert "evaluation mode" not in log_of(tmp_path / str(number))
    assert differences(*map(weights_of, modules)) == []


@pytest.fixture(scope="module")
def frozen_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a frozen module, and the same run interrupted in its second epoch."""
    root = tmp_path_factory.mktemp("frozen")
    train(make_frozen(_freeze), make_noise(), log_dir=root / "whole", batch_size=4)
    with pytest.raises(zoo.TrainingInterrupted):
        train(make_frozen(_freeze), interrupting_noise(), log_dir=root / "parts", batch_size=4)
    return root


@pytest.mark.parametrize("given", [_freeze, _freeze_all_but_head, nn.Module.eval, nn.Module.train])
def test_resumed_run_has_modes_of_checkpoint(given: Callable[[Any], object], frozen_runs: Path, tmp_path: Path) -> None:
    parts = shutil.copytree(frozen_runs / "parts", tmp_path / "parts")
    resumed = train(make_frozen(given), make_noise(), log_dir=parts, batch_size=4, resume="auto")
    assert differences(read(frozen_runs / "whole" / "checkpoint.pth.tar"), read(resumed.checkpoint)) == []
    assert ("mode as in the checkpoint" in log_of(parts)) == (given is _freeze_all_but_head)


def _train_on_rank(is_frozen: bool, log_dir: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train; rank 0's weights and modes are used."""
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(rank)
    module: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    if is_frozen:
        module = make_frozen(nn.Module.train if rank else _freeze)
    result = train(module, make_noise(), make_noise(8), log_dir=log_dir)
    return weights_of(module), dict(result.scores)


@pytest.mark.dist
@pytest.mark.parametrize("is_frozen", [False, True])
def test_two_processes_train_the_same_network(is_frozen: bool, tmp_path: Path) -> None:
    first, second = run_distributed(_train_on_rank, 2, is_frozen, tmp_path / "two", group=False)
    assert differences(first, second) == []
    if is_frozen:
        assert first[0]["0.1.num_batches_tracked"] == 0
        assert torch.equal(first[0]["0.1.running_mean"], torch.zeros(4))
    else:
        weights, scores = _train_on_rank(is_frozen, tmp_path / "one")
        torch.testing.assert_close(first[0], weights)
        assert first[1] == scores


# Parameters without gradient

#: Whether the second head of the network is used in a training pass, by rank and number of the pass.
USES: dict[str, Callable[[int, int], bool]] = {
    "sometimes on one rank": lambda rank, count: rank == 0 or count != 2,
    "sometimes": lambda rank, count: count != 2,
    "last micro-batch": lambda rank, count: count != 4,
}


class TwoHeads(nn.Module):
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


def _train_two_heads(kind: str, log_dir: Path) -> str:
    rank = int(os.environ.get("RANK", 0))
    module: nn.Module = TwoHeads(partial(USES.get(kind, lambda rank, count: False), rank))
    if kind == "frozen":
        module.other.requires_grad_(False)  # type: ignore[union-attr]
    if kind == "deep":
        module = nn.Sequential(module)
    options = {"accumulate_steps": 2} if kind == "last micro-batch" else {}
    replicas = 2 if kind == "replicas" else None
    try:
        train(module, make_noise(), make_noise(8), log_dir=log_dir, optimizer=options, replicas=replicas)
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
    for rank, end in enumerate(run_distributed(_train_two_heads, 2, kind, tmp_path / "log", group=False)):
        if rank not in ranks:
            assert end == "torch"
            continue
        prefix = "0." if kind == "deep" else ""
        names = f"{prefix}other.weight, {prefix}other.bias"
        assert f"2 of 4 parameters got no gradient on rank {rank} in step {step} ({names})" in end
        assert "requires_grad_(False)" in end
    assert _train_two_heads(kind, tmp_path / "alone") == "trained"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["frozen", "replicas"])
def test_frozen_parameters_and_replicas_need_no_gradient(kind: str, tmp_path: Path) -> None:
    assert run_distributed(_train_two_heads, 2, kind, tmp_path, group=False) == ["trained"] * 2


# Results and checkpoints


def test_run_without_validation_has_checkpoint_and_no_scores(tmp_path: Path) -> None:
    result = train(make_module(), make_noise(), log_dir=tmp_path, epochs=1, batch_size=12)
    assert (result.scores, result.best_score, result.best_epoch, result.best_weights) == ({}, None, None, None)
    saved = read(result.checkpoint)
    assert (saved["position"]["step"], saved["network"], saved["class_names"]) == (2, None, None)
    longer = train(make_module(), make_noise(), log_dir=tmp_path, epochs=2, batch_size=12, resume="auto")
    assert read(longer.checkpoint)["position"]["step"] == 4
    assert "rewritten: " not in log_of(tmp_path)


def test_lean_module_is_bit_identical(tmp_path: Path) -> None:
    modules = [make_module(), make_module()]
    for module, memory in zip(modules, (None, "lean"), strict=True):
        train(module, make_noise(), log_dir=tmp_path / str(memory), epochs=1, memory=memory)
    assert [is_lean(module) for module in modules] == [False, True]
    assert differences(*map(weights_of, modules)) == []


@pytest.mark.usefixtures("small_networks")
def test_checkpoint_describes_unchanged_zoo_module(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "verbose": False}
    result = zoo.train(zoo.get("resnet32_cifar", num_classes=3), make_noise(16), log_dir=tmp_path / "a", **options)
    assert differences(weights_of(zoo.get(result.checkpoint)), weights_of(result.model)) == []
    changed: Any = zoo.get("resnet32_cifar", num_classes=3)
    changed.classifier.fc = nn.Sequential(nn.Dropout(0.5), changed.classifier.fc)
    result = zoo.train(changed, make_noise(16), log_dir=tmp_path / "b", **options)
    assert read(result.checkpoint)["network"] is None


def test_moving_average_is_returned_if_there_is_one(tmp_path: Path) -> None:
    module = make_module()
    result = train(module, make_noise(), log_dir=tmp_path, optimizer={"ema_decay": 0.5})
    saved = read(result.checkpoint)
    assert differences(weights_of(result.model), saved["ema"]) == []
    assert differences(weights_of(module), saved["state_dict"]) == []
    assert differences(saved["ema"], saved["state_dict"])


@pytest.mark.usefixtures("small_networks")
def test_settings_may_be_experiment(tmp_path: Path) -> None:
    spec = NetworkSpec(arch="resnet32_cifar", num_classes=2, norm="inplace")
    options: dict[str, Any] = {"experiment": "resnet32_cifar10_short", "epochs": 1, "batch_size": 12}
    config = read(zoo.train(spec, make_noise(), log_dir=tmp_path, **options).checkpoint)["config"]
    bundled = zoo.config.parse.load_experiment("resnet32_cifar10_short")
    assert (config["network"]["norm"], config["network"]["num_classes"]) == ("inplace", 2)
    assert config["optimizer"]["learning_rate"] == bundled.optimizer.learning_rate
    assert (config["optimizer"]["batch_size"], config["optimizer"]["schedule"]["epochs"]) == (12, 1)


@pytest.mark.usefixtures("small_networks")
def test_names_of_split_image_folder_reach_checkpoint(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=16, num_val=4)
    split, val = random_split(ImageFolder(data / "train"), [12, 4], torch.Generator().manual_seed(0))
    saved = read(train("resnet32_cifar", split, val, log_dir=tmp_path / "log", epochs=1).checkpoint)
    assert saved["class_names"] == saved["network"]["class_names"] == ["class0", "class1"]
    (data / "val/class0").rename(data / "val/other")
    other = partial(zoo.train, "resnet32_cifar", split, ImageFolder(data / "val"), log_dir=tmp_path / "other")
    refused(zoo.DataError, other, "class1, other", "class0, class1")


# Refusals, and names of classes

X = torch.zeros(3, 6, 6)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


def fixed(item: Any, *classes: str) -> Items:
    return Items(lambda index: item, classes=classes)


def _raise(index: int) -> Any:
    raise OSError("damaged")


CATS, DOGS = fixed((X, 0), "cat", "dog"), fixed((X, 0), "dog", "cat")


@pytest.mark.parametrize(
    ("network", "data", "names"),
    [
        (make_module(), (Stream(),), ["Stream: "]),
        (make_module(), (3,), ["int: "]),
        (make_module(), (make_noise(label=2),), [" of Items: ", "label is 2", "2 outputs"]),
        (make_module(), (make_noise(), make_noise(label=-1)), [" of Items: ", "label is -1"]),
        (make_module(), (fixed((X, -1)),), ["item 0 of Items: ", "label is -1"]),
        (make_module(), (fixed((X.double(), 0)),), ["item 0 of Items: ", "torch.float64"]),
        (make_module(), (Items(lambda n: (X[:, : 6 - n % 2], 0)),), ["of Items: ", "(3, 6, 6)", "(3, 5, 6)"]),
        (make_module(), (fixed(X),), ["item 0 of Items: ", "tensor", "pair ("]),
        (make_module(), (fixed((X, 0.5)),), ["item 0 of Items: ", "label is 0.5"]),
        (make_module(), (fixed(("a.png", 0)),), ["a str"]),
        (make_module(), (Items(_raise),), ["item 0 of Items: ", "(damaged)"]),
        (make_module(), (CATS, DOGS), ["dog, cat", "cat, dog"]),
        (make_module(), (fixed((X, 0), "a", "b", "c"),), ["Items: ", "3 classes", "2 outputs"]),
        ("resnet32_cifar", (make_noise(),), ["Items: ", "num_classes=N"]),
        ("resnet32_cifar10_short", ("data", make_noise()), ["val is given"]),
        ("quickstart_scenes", (make_noise(),), ["Items: deeplab_"]),
        (nn.Conv2d(3, 2, 1), (make_noise(),), ["(2, 2, 6, 6)", "(3, 6, 6)"]),
    ],
)
def test_unusable_data_and_networks_raise(
    network: Any, data: tuple[Any, ...], names: list[str], tmp_path: Path
) -> None:
    refused(zoo.ZooError, lambda: zoo.train(network, *data, log_dir=tmp_path, epochs=1, batch_size=4), *names)


@pytest.mark.parametrize(
    ("network", "options", "names"),
    [
        ("resnet32_cifar10_short", {"experiment": SETTINGS}, ["two experiments"]),
        ("revbifpn_s3", {"experiment": "revbifpn_s3_imagenet"}, ["optimizer: ", "revbifpn_s3"]),
        (make_module(), {"memory": "checkpoint"}, ["memory", "'lean'"]),
    ],
)
def test_contradictory_arguments_raise(network: Any, options: Any, names: list[str], tmp_path: Path) -> None:
    refused(zoo.ConfigError, lambda: zoo.train(network, make_noise(), log_dir=tmp_path, **options), *names)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "subset": lambda data: Subset(data, range(len(data))),
    "split": lambda data: random_split(data, [0.5, 0.5])[1],
    "split of subset": lambda data: random_split(Subset(data, range(4)), [3, 1])[0],
    "concatenation": lambda data: ConcatDataset([data, Subset(data, [0])]),
    "subset of concatenation": lambda data: Subset(ConcatDataset([data, data]), [9, 2]),
    "concatenation with unnamed part": lambda data: ConcatDataset([make_noise(), data]),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_data_sets_name_their_classes(wrap: Callable[[Any], Any]) -> None:
    assert class_names_of(wrap(CATS)) == ["cat", "dog"]
    for data, val, other in ((wrap(CATS), CATS, DOGS), (CATS, wrap(CATS), wrap(DOGS))):
        Datasets(data, val)
        refused(zoo.DataError, partial(Datasets, data, other), "classes dog, cat", "data cat, dog")


def test_attribute_classes_of_wrapper_is_used() -> None:
    subset: Any = Subset(CATS, [0])
    subset.classes = ["a", "b"]
    assert class_names_of(subset) == ["a", "b"]
    assert class_names_of(Subset(make_noise(), [0])) == []


@pytest.mark.parametrize("depth", [0, 2])
def test_concatenation_of_two_numberings_raises(depth: int) -> None:
    both: Any = ConcatDataset([CATS, DOGS])
    for _ in range(depth):
        both = Subset(both, range(8))
    for datasets in (partial(Datasets, both), partial(Datasets, CATS, both)):
        refused(zoo.DataError, datasets, "ConcatDataset: ", "cat, dog and dog, cat", "target_transform")
