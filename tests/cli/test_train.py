"""``zoo train`` writes a run that can be scored, resumed and extended."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zoo
from scripts.train_imagenet import OriginalTrain
from tests.cli.conftest import NUM_VAL, SETTINGS, Cli, Run, events
from tests.data.sample_labels import label_map, make_labeled
from tests.dist.spawn import run_distributed
from tests.engine.tiny import make_images
from zoo.cli import main, run_script
from zoo.config.network import NetworkSpec
from zoo.config.parse import load_experiment, parse_experiment
from zoo.registry.experiments import default_experiment, with_changes
from zoo.weights import read_checkpoint

ONE_EPOCH = ["-j", "0", "--epochs", "1"]
#: Small images for the default settings of an architecture.
SMALL_IMAGES = [f"--set=input.{key}=12" for key in ("crop_train", "crop_val", "scale_val")]
SEGMENTATION_SCORES = ("miou", "pixel_accuracy", "mean_class_accuracy", "frequency_weighted_iou")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


def test_run_leaves_checkpoints_settings_metrics_and_tensorboard(finished: Run) -> None:
    names = {path.name for path in finished.log_dir.iterdir() if not path.name.startswith("events.")}
    assert names >= {"checkpoint.pth.tar", "model_best.pth.tar", "training_0.log", "metrics.jsonl"}
    epoch = ["train", "train", "train", "validation"]
    assert [event["event"] for event in events(finished.log_dir)] == ["start", *epoch, *epoch, "end"]
    assert events(finished.log_dir)[-1]["seconds"] > 0
    board = EventAccumulator(str(finished.log_dir))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("val/top1")] == [3, 6]
    settings = finished.log_dir / "experiment.json"
    assert load_experiment(settings) == load_experiment(finished.config)
    assert json.loads(settings.read_text())["optimizer"]["momentum"] == 0.9  # a default


def test_run_logs_summary_at_its_beginning_and_end(finished: Run) -> None:
    text = (finished.log_dir / "training_0.log").read_text()
    validations = [event for event in events(finished.log_dir) if event["event"] == "validation"]
    best = max(validations, key=lambda event: event["top1"])
    for part in (
        "training resnet32_cifar: 463,634 parameters, inplace norms with leaky_relu, 2 classes",
        f"images      24 to train on, {NUM_VAL} to validate on; {finished.data}",
        "schedule    2 epochs of 3 steps, batch 8",
        "device      cpu, 1 process",
        f"log folder  {finished.log_dir}",
        f"best top-1 {best['top1']:.2f} % after epoch {best['epoch'] + 1}; {finished.log_dir}/model_best.pth.tar",
    ):
        assert part in text
    assert text.splitlines()[-1].partition(" - ")[2].startswith("best top-1")


def test_run_resumes_from_its_checkpoint_and_is_extended(finished: Run, cli: Cli, tmp_path: Path) -> None:
    log_dir, before = Path(shutil.copytree(finished.log_dir, tmp_path / "log")), events(finished.log_dir)
    (log_dir / "checkpoint.previous.pth.tar").rename(log_dir / "checkpoint.pth.tar")
    train = ["train", finished.config, finished.data, "--log-dir", log_dir, "-p", 1, "-j", 0, "--resume", "auto"]
    cli(*train)
    *again, end = events(log_dir)[len(before) :]
    assert end["event"] == "end"
    assert [(event["event"], event["step"]) for event in again] == [
        *(("resume", 3), ("train", 4), ("train", 5), ("train", 6), ("validation", 6)),
    ]
    assert [event["top1"] for event in again[1:]] == [event["top1"] for event in before[-5:-1]]
    cli(*train, "--epochs", 3)
    assert read_checkpoint(log_dir / "checkpoint.pth.tar")["position"]["epoch"] == 3
    assert load_experiment(log_dir / "experiment.json").optimizer.schedule.epochs == 3
    assert "prolonged from 2 to 3 epochs; " in (log_dir / "training_0.log").read_text()
    new = events(log_dir)[len(before) + len(again) + 1 :]
    assert [event["epoch"] for event in new if event["event"] == "validation"] == [2]
    assert "optimizer.schedule.epochs: 3 before and 2 now" in cli(*train, code=2).err


def test_original_projects_script_scores_weights_of_run(finished: Run, cli: Cli) -> None:
    words = [finished.config, finished.data, "-e", "-j", 0]

    def script(words: list[str]) -> int:
        return run_script(OriginalTrain, words)

    _, (name, protocol, top1, *_) = cli(*words, "--resume", finished.checkpoint, run=script).rows
    assert (name, protocol, top1) == ("tiny", "center10-scale12", f"{events(finished.log_dir)[-2]['top1']:.2f}")
    assert "--evaluate scores the weights of --resume" in cli(*words, run=script, code=2).err


@pytest.mark.usefixtures("small_networks")
def test_named_experiment_has_its_own_log_folder_and_seed(
    finished: Run, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "work").mkdir()
    shutil.copy(finished.config, tmp_path / "experiments" / "tiny.json")
    monkeypatch.setattr("zoo.config.parse.experiments_dir", lambda: tmp_path / "experiments")
    monkeypatch.chdir(tmp_path / "work")
    cli("train", "tiny", finished.data, *ONE_EPOCH, "--seed", 3)
    assert [path.as_posix() for path in Path().glob("*/*")] == ["runs/tiny"]
    assert Path("runs/tiny/checkpoint.pth.tar").is_file()
    assert json.loads(Path("runs/tiny/experiment.json").read_text())["seed"] == 3


@pytest.mark.usefixtures("small_networks")
def test_run_ends_with_commands_that_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_images(tmp_path / "my data", num_train=4, num_val=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(SETTINGS))
    printed = cli("train", "x.json", data, "--log-dir", "run 1", *ONE_EPOCH).out
    lines = dict(line.split(None, 1) for line in printed.splitlines())
    assert list(lines) == ["score", "use", "curves", "TensorBoard"]
    image = next((data / "val").rglob("*.png"))
    for name in ("score", "curves", "use"):
        cli(*(image if word == "IMAGE" else word for word in shlex.split(lines[name])[1:]))
    assert shlex.split(lines["TensorBoard"]) == ["tensorboard", "--logdir", "run 1"]


@pytest.mark.dist
def test_replicas_log_same_digests_on_one_process_and_on_two(finished: Run, cli: Cli, tmp_path: Path) -> None:
    command = ["train", str(finished.config), str(finished.data), "--replicas", "4", "-j", "0", "--log-dir"]
    one, two = tmp_path / "one", tmp_path / "two"
    cli(*command, one)
    assert not torch.are_deterministic_algorithms_enabled()
    assert run_distributed(main, 2, [*command, str(two)], group=False) == [0, 0]
    digests = [[each["sha256"] for each in events(folder) if each["event"] == "digest"] for folder in (one, two)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2
    assert f"epoch 2 digest: {digests[0][1]}" in (two / "training_1.log").read_text()
    checkpoints = (folder / "checkpoint.pth.tar" for folder in (one, two))
    assert cli("show", *checkpoints).out.startswith(digests[0][1])


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("name", ["resnet32_cifar", "torchvision:shufflenet_v2_x0_5"])
def test_architecture_is_trained_with_default_settings(name: str, data: Path, cli: Cli, tmp_path: Path) -> None:
    printed = cli("train", name, data, "--log-dir", tmp_path / "log", *ONE_EPOCH, *SMALL_IMAGES).err
    assert f"{name} with default settings; experiment.json in the log folder has all of them" in printed
    found = load_experiment(tmp_path / "log" / "experiment.json")
    spec = type(found.network)(arch=name, num_classes=2)
    images = {"input.crop_train": 12, "input.crop_val": 12, "input.scale_val": 12}
    assert found == with_changes(default_experiment(spec, data), epochs=1, replaced=images)
    model = zoo.get(tmp_path / "log" / "checkpoint.pth.tar")
    assert type(model) is type(zoo.get(name, num_classes=2))


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("name", ["resnet32_cifar", "resnet32_cifar10"])
def test_set_replaces_settings_of_architectures_and_experiments(
    name: str, data: Path, cli: Cli, tmp_path: Path
) -> None:
    changes = [
        *("optimizer.type=Adam", "optimizer.schedule.type=constant", "optimizer.learning_rate=0.5"),
        *("network.classes=2", "network.memory=plain", "training.channels_last=true"),
        *("input.mean=[0, 0, 0]", "input.scale_train=32", "input.scale_val=32"),
    ]
    cli("train", name, data, "--log-dir", tmp_path / "log", *ONE_EPOCH, *(f"--set={change}" for change in changes))
    found = load_experiment(tmp_path / "log" / "experiment.json")
    assert (found.optimizer.type, found.optimizer.nesterov, found.optimizer.learning_rate) == ("Adam", False, 0.5)
    assert (found.optimizer.schedule.type, found.optimizer.schedule.epochs) == ("constant", 1)
    assert (found.network.num_classes, found.network.memory, found.input.mean) == (2, "plain", [0, 0, 0])
    assert found.training.channels_last


@pytest.mark.usefixtures("small_networks")
def test_missing_classes_are_named_again_at_the_end_of_run(data: Path, tmp_path: Path) -> None:
    settings = {"input.crop_train": 12, "input.crop_val": 12}
    spec = NetworkSpec(arch="resnet32_cifar", num_classes=1000)
    zoo.train(spec, data, log_dir=tmp_path / "log", epochs=1, settings=settings, verbose=False)
    lines = (tmp_path / "log" / "training_0.log").read_text().splitlines()
    assert "2 class folders for a network with 1,000 outputs; set network.num_classes to 2" in lines[-1]


def _segmentation(path: Path, num_classes: int = 3, epochs: int = 1, **section: Any) -> Path:
    schedule = {"type": "polynomial", "mode": "step", "epochs": epochs}
    content = {
        "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "norm": "inplace", "classes": num_classes},
        "optimizer": {"batch_size": 4, "learning_rate": 0.01, "schedule": schedule},
        "input": {"crop_train": 16},
        "segmentation": section,
    }
    parse_experiment(content, "test")
    path.write_text(json.dumps(content))
    return path


@pytest.mark.usefixtures("small_networks")
def test_segmentation_is_trained_and_scored(cli: Cli, tmp_path: Path) -> None:
    data, log_dir, file = make_labeled(tmp_path / "data", num_train=8, num_val=5), tmp_path / "log", tmp_path / "x"
    cli("train", _segmentation(tmp_path / "tiny.json"), data, "--log-dir", log_dir, "-j", 0, "-p", 1)
    start, train, last_train, validation, end = events(log_dir)
    assert (start["event"], train["event"], validation["event"], end["event"]) == (
        *("start", "train", "validation", "end"),
    )
    assert {f"{prefix}{name}" for prefix in ("", "epoch_") for name in SEGMENTATION_SCORES} <= last_train.keys()
    assert len(validation["iou"]) == 3
    assert "confusion" not in validation
    miou, accuracy = f"mIoU {validation['miou']:.2f}", f"pixel accuracy {validation['pixel_accuracy']:.2f}"
    text = (log_dir / "training_0.log").read_text()
    assert f"epoch 1 validation: {miou}, {accuracy}" in text
    assert f"best {miou} % after epoch 1" in text
    board = EventAccumulator(str(log_dir), size_guidance={"images": 0})
    board.Reload()
    assert [event.step for event in board.Scalars("val/miou")] == [2]
    assert board.Scalars("train/miou")
    checkpoint = log_dir / "checkpoint.pth.tar"
    cli("validate", checkpoint, data, "-j", 0, "--protocol", "whole", "--json", file)
    scored = json.loads(file.read_text())
    assert (scored["protocol"], scored["miou"]) == ("whole", read_checkpoint(checkpoint)["best_prec1"])
    assert (len(scored["confusion"]), scored["count"]) == (3, 5)


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("uniform", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_epoch_names_classes_without_pixel(
    uniform: bool, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    data = make_labeled(tmp_path / "data", num_train=4, num_val=2)
    for path in data.rglob("labels/**/*.png"):
        label_map([[0, 255] * 6] * 10).save(path)
    config = _segmentation(tmp_path / "tiny.json", num_classes=2, epochs=2, class_uniform=uniform)
    cli("train", config, data, "--log-dir", tmp_path / "log", "-j", 0)
    text = (tmp_path / "log" / "training_0.log").read_text()
    what = "1 of 2 classes have no pixel: 1; 255 is void: write 1 in place of 255 in masks of 0 and 255"
    assert text.count(f"{what}; the training crops of epoch 1\n") == 1
    assert text.count(f"{what}; the validation data\n") == 1
