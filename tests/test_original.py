"""The command lines of the original project work, with their options and files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zoo
from scripts.test_imagenet import ScoreImageNet
from scripts.test_vistas import SegmentVistas
from scripts.train_imagenet import OriginalTrain
from tests.cli.conftest import Run, finished, write_segmenter
from tests.convert.networks import scramble
from tests.data.sample_images import make_splits, random_image
from tests.engine.tiny import differences
from zoo.cli import main, run_script
from zoo.cli.options import Command
from zoo.config.parse import parse_experiment
from zoo.run.run_log import RunLog

__all__ = ["finished"]


@pytest.fixture(scope="module")
def vistas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with settings, a file of body, head and cls as the published one, and two images in ``in``."""
    root = tmp_path_factory.mktemp("vistas")
    write_segmenter(root)
    (root / "in").mkdir()
    for seed, name in enumerate(("a.png", "b.jpg")):
        random_image(seed, 40, 60).save(root / "in" / name)
    return root


@pytest.fixture(autouse=True)
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 15 million parameters takes the place of the published one, which has 136."""
    if "vistas" in request.fixturenames:
        monkeypatch.setattr("scripts.test_vistas.NETWORK", str(request.getfixturevalue("vistas") / "tiny.json"))


def test_file_may_dilate_each_block_of_resnext(tmp_path: Path) -> None:
    network = {"arch": "resnext50", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 3}
    path = tmp_path / "dilated.json"
    path.write_text(json.dumps({"network": {**network, "dilation": [1, 1, [2, 1, 2, 1, 2, 1], [1, 1, 1]]}}))
    model = zoo.get(str(path))
    assert [block.convs.conv2.dilation[0] for block in model.mod4] == [2, 1, 2, 1, 2, 1]
    assert model.feature_info.reduction() == [4, 4, 8, 8, 8]


def _segment(root: Path, out: Path, *words: str) -> int:
    return run_script(SegmentVistas, [str(root / "model.pth.tar"), str(root / "in"), str(out), *words])


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a described ReLU file, and experiments with another activation and another norm."""
    root = tmp_path_factory.mktemp("relu")
    make_splits(root / "data")
    torch.manual_seed(0)
    model = scramble(zoo.get("resnet18", activation="relu", num_classes=3), positive=True)
    torch.save({"state_dict": model.state_dict(), "network": model.built_as.model_dump(mode="json")}, root / "relu.pth")
    forms = {"leaky": ("standard", "leaky_relu"), "inplace": ("inplace", "leaky_relu"), "same": ("standard", "relu")}
    for name, (norm, activation) in forms.items():
        network = {"arch": "resnet18", "bn_mode": norm, "activation": activation, "classes": 3}
        settings = {"network": network, "optimizer": {"batch_size": 4, "schedule": {"epochs": 1}}}
        images = {"crop_train": 32, "scale_val": 36, "crop_val": 32}
        (root / f"{name}.json").write_text(json.dumps({**settings, "input": images}))
    return root


@pytest.mark.parametrize(
    "name", ["inplace", pytest.param("leaky", marks=pytest.mark.slow), pytest.param("same", marks=pytest.mark.slow)]
)
def test_weights_are_transferred_while_validating(
    relu: Path, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment, weights, data = str(relu / f"{name}.json"), str(relu / "relu.pth"), str(relu / "data")
    options = ["-j", "0", "--crop", "32", "--scale", "36"]
    with caplog.at_level("WARNING"):
        script = [experiment, weights, data, *options, "--json", str(tmp_path / "script.json")]
        assert run_script(ScoreImageNet, script) == 0
    notices = [line for line in caplog.messages if "relu.pth" in line]
    assert sum("trained with relu and used with leaky_relu (0.01)" in line for line in notices) == (name != "same")
    assert sum("standard-to-inplace resnet18: exact" in line for line in notices) == (name == "inplace")
    assert len(notices) == {"leaky": 1, "inplace": 2, "same": 0}[name]
    command = ["validate", experiment, data, "--weights", weights, *options, "--json", str(tmp_path / "zoo.json")]
    assert main(command) == 0
    model = zoo.get("resnet18", activation="relu" if name == "same" else "leaky_relu", num_classes=3)
    model.load_state_dict(torch.load(weights, weights_only=True)["state_dict"])
    bare = zoo.load_network(experiment, weights)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(bare.model.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-4)
    losses = [json.loads((tmp_path / f"{each}.json").read_text())["loss"] for each in ("script", "zoo")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["inplace", pytest.param("leaky", marks=pytest.mark.slow)])
def test_training_starts_from_weights_of_another_activation_or_norm(
    relu: Path, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["-j", "0", "--weights", str(relu / "relu.pth"), "--log-dir", str(tmp_path / "log")]
    with caplog.at_level("WARNING"):
        assert main(["train", str(relu / f"{name}.json"), str(relu / "data"), *words]) == 0
    assert sum("trained with relu and used with leaky_relu" in line for line in caplog.messages) == 1
    assert (tmp_path / "log" / "checkpoint.pth.tar").exists()


@pytest.mark.parametrize(
    ("fusion", "mode"), [("mean", "palette"), ("mean", "raw"), ("mean", "prob"), ("voting", "prob"), ("max", "raw")]
)
def test_vistas_script_writes_originals_files(vistas: Path, tmp_path: Path, fusion: str, mode: str) -> None:
    words = ["--scales", "[0.7, 1]", "--flip", "--fusion-mode", fusion, "--output-mode", mode]
    assert _segment(vistas, tmp_path / "out", *words) == 0
    endings = [".png", "_prob.png"] if mode == "prob" else [".png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        name + ending for name in ("a", "b") for ending in endings
    )
    with Image.open(tmp_path / "out" / "a.png") as image:
        assert image.size == (40, 60)
        assert image.mode == ("P" if mode == "palette" else "L")
        if mode == "palette":  # not all reds, then all greens, then all blues
            assert image.getpalette("RGB")[:6] == [0xA5, 0x2A, 0x2A, 0x00, 0xC0, 0x00]


def _originals_maps(
    model: torch.nn.Module, image: Image.Image, scales: Sequence[float], flip: bool, fusion: str
) -> tuple[Image.Image, Image.Image]:
    """Return classes, and probabilities times 255, selected at a longer side of 48 px and resized by nearest pixel."""
    factor = 48 / max(image.size)
    small = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BILINEAR)
    x = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None] / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])  # of the small network
    x = (x - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    views = []
    for scale in scales:
        for mirrored in (False, True)[: 1 + flip]:
            view = x.flip(-1) if mirrored else x
            if scale != 1:
                size = [round(side * scale) for side in x.shape[-2:]]
                view = F.interpolate(view, size=size, mode="bilinear", align_corners=False)
            logits = model.cls(model.head(model.body(view)))
            logits = F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)
            views.append((logits.flip(-1) if mirrored else logits).softmax(1)[0])
    stacked = torch.stack(views)
    best, classes = (stacked.mean(0) if fusion == "mean" else stacked.amax(0)).max(0)
    maps = classes.byte().numpy(), (best * 255).byte().numpy()
    classes_map, prob_map = (Image.fromarray(each).resize(image.size, Image.Resampling.NEAREST) for each in maps)
    return classes_map, prob_map


@pytest.mark.parametrize(
    ("size", "scales", "flip", "fusion"),
    [
        ((150, 20), (1.0,), False, "mean"),
        ((40, 60), (0.7, 1.0), True, "mean"),
        ((30, 21), (1.2, 0.5), True, "max"),
        ((48, 48), (1.0,), False, "max"),
    ],
)
@torch.no_grad()
def test_vistas_script_selects_classes_at_scaled_size(
    vistas: Path, tmp_path: Path, size: tuple[int, int], scales: tuple[float, ...], flip: bool, fusion: str
) -> None:
    (tmp_path / "in").mkdir()
    image = random_image(3, *size)
    image.save(tmp_path / "in" / "a.png")
    words = [f"--scales={list(scales)}", *["--flip"] * flip, "--fusion-mode", fusion, "--output-mode", "prob"]
    files = [str(vistas / "model.pth.tar"), str(tmp_path / "in"), str(tmp_path / "out")]
    assert run_script(SegmentVistas, [*files, *words]) == 0
    model = zoo.get("deeplab_resnet18", norm="inplace", num_classes=65, weights=vistas / "model.pth.tar").eval()
    classes, probabilities = map(np.asarray, _originals_maps(model, image, scales, flip, fusion))
    found = _pixels(tmp_path / "out" / "a.png")
    assert len(np.unique(classes)) > 1
    assert found.shape == classes.shape == (size[1], size[0])
    assert (found == classes).mean() == 1
    assert np.abs(_pixels(tmp_path / "out" / "a_prob.png").astype(int) - probabilities).max() <= 1


def test_vistas_script_reads_jpg_jpeg_and_png_of_folder_itself(vistas: Path, tmp_path: Path) -> None:
    names = ["a.png", "b.jpg", "c.jpeg", "d.PNG", "e.bmp", "f.webp", "g.tif", ".h.png", "sub/i.png"]
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in names:
        random_image(0).save(tmp_path / "in" / name)
    words = [str(vistas / "model.pth.tar"), str(tmp_path / "in"), str(tmp_path / "out"), "--scales", "[1]"]
    assert run_script(SegmentVistas, words) == 0
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["a.png", "b.png", "c.png", "d.png"]


def test_vistas_script_without_images_raises(vistas: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_image(0).save(tmp_path / "a.bmp")
    words = [str(vistas / "model.pth.tar"), str(tmp_path), str(tmp_path / "out")]
    assert run_script(SegmentVistas, words) == 2
    assert f"{tmp_path}: " in (error := capsys.readouterr().err)
    assert ".jpg .jpeg .png" in error
    assert ".bmp" not in error


def test_vistas_script_has_originals_scales_and_abbreviations(vistas: Path, tmp_path: Path) -> None:
    assert _segment(vistas, tmp_path / "default") == 0
    assert _segment(vistas, tmp_path / "named", "--sc", "0.7, 1, 1.2", "--fus", "mean", "--out", "raw") == 0
    for name in ("a.png", "b.png"):
        assert np.array_equal(_pixels(tmp_path / "default" / name), _pixels(tmp_path / "named" / name))


@pytest.mark.parametrize("text", ["", "[]", "1 2", "(1", "__import__('os').abort()", "0x1"])
def test_vistas_script_parses_scales_and_never_evaluates_them(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run_script(SegmentVistas, ["model", "in", "out", f"--scales={text}"])
    assert error.value.code == 2
    assert "is not a list of numbers, such as" in capsys.readouterr().err


def test_colliding_output_files_raise(vistas: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "a.jpg"):
        random_image(0).save(tmp_path / name)
    words = [str(vistas / "model.pth.tar"), str(tmp_path), str(tmp_path / "out")]
    assert run_script(SegmentVistas, words) == 2
    assert "would have the same name" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _scored(run: Run, folder: Path, *words: str) -> dict[str, Any]:
    """Return the output of the test script for the finished run, whose settings are crop 10 and scale 12."""
    files = [str(run.config), str(run.checkpoint), str(run.data), "-j", "0", "--json", str(folder / "scores.json")]
    assert run_script(ScoreImageNet, [*files, *words]) == 0
    content: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return content


@pytest.mark.parametrize(
    ("words", "protocol"),
    [
        ("", "center224"),
        ("--ten_crops", "tencrop224"),
        ("-c 10", "center10-scale256"),
        ("--crop 200 --scale 224", "center200-scale224"),
        ("-c 8 -s -1", "center8-scaleoriginal"),
        ("--protocol center320", "center320"),
        ("--interpolation bicubic", "center224-scale256-bicubic"),
    ],
)
def test_test_script_has_originals_crop(finished: Run, tmp_path: Path, words: str, protocol: str) -> None:
    scores = _scored(finished, tmp_path, "--limit", "1", *words.split())
    assert (scores["protocol"], scores["count"]) == (protocol, 1)


@pytest.fixture
def _no_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that it is restored
    monkeypatch.delenv("LOCAL_RANK")


@pytest.mark.usefixtures("_no_local_rank")
@pytest.mark.parametrize("words", ["--local_rank 3", "--local_rank=3", "--local-rank 3", "--local-rank=3"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("command", "files"), [(ScoreImageNet, "config checkpoint data"), (OriginalTrain, "config data")]
)
def test_local_rank_is_accepted_at_any_place(
    command: type[Command], files: str, monkeypatch: pytest.MonkeyPatch, words: str, first: bool
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(command, "run", lambda self: seen.append(os.environ["LOCAL_RANK"]) or 0)
    assert run_script(command, f"{words} {files}".split() if first else f"{files} {words}".split()) == 0
    assert seen == ["3"]


@pytest.mark.usefixtures("_no_local_rank")
def test_local_rank_selects_device(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def open_device(local_rank: int) -> torch.device:
        seen.append(local_rank)
        return torch.device("cpu")

    monkeypatch.setattr("zoo.engine._process._open_device", open_device)
    score = [str(finished.config), str(finished.checkpoint), str(finished.data), "--limit", "1", "-c", "8", "-j", "0"]
    train = [str(finished.config), str(finished.data), "-j", "0", "--epochs", "1", "--log-dir", str(tmp_path / "log")]
    assert run_script(ScoreImageNet, ["--local_rank=3", *score]) == 0
    assert run_script(OriginalTrain, ["--local_rank=3", *train]) == 0
    assert main(["validate", "--local_rank=3", str(finished.checkpoint), str(finished.data), "-j", "0"]) == 0
    assert seen == [3, 3, 3]


@pytest.mark.usefixtures("_no_local_rank")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--local_rank", "argument --local-rank/--local_rank: expected one argument"),
        ("--local_rank=-1", "'-1' is not a whole number of at least 0"),
        ("--local-rank two", "'two' is not a whole number of at least 0"),
        ("--local-rank 2 --local_rank=1", "--local-rank 1, but the environment has LOCAL_RANK=0"),
    ],
)
@pytest.mark.parametrize("command", [ScoreImageNet, OriginalTrain])
def test_wrong_local_rank_is_usage_error(
    command: type[Command],
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "environment" in message:
        monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as error:
        run_script(command, ["config", "checkpoint", *words.split()])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_scripts_take_backend_of_process_group(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = [str(finished.config), str(finished.checkpoint), str(finished.data), "--limit", "1", "-c", "8", "-j", "0"]
    train = [str(finished.config), str(finished.data), "-j", "0", "--epochs", "1"]
    commands = [
        (partial(run_script, ScoreImageNet), score),
        (partial(run_script, OriginalTrain), [*train, "--log-dir", str(tmp_path / "script")]),
        (partial(run_script, OriginalTrain), [*train[:-2], "-e", "--resume", str(finished.checkpoint)]),
        (main, ["train", *train, "--log-dir", str(tmp_path / "command")]),
        (main, ["validate", *score[1:]]),
    ]
    for run, words in commands:
        assert run([*words, "--dist-backend", "nccl"]) == 2
        assert "--dist-backend nccl needs CUDA, which this machine lacks; leave it out" in capsys.readouterr().err
        assert run([*words, "--dist-backend", "gloo"]) == 0
        with pytest.raises(SystemExit) as error:
            run([*words, "--dist-backend", "mpi"])
        assert error.value.code == 2
        assert "--dist-backend: invalid choice: 'mpi' (choose from " in capsys.readouterr().err


def _as_original(checkpoint: Path, path: Path) -> Path:
    """Write a checkpoint like the original trainer, with the prefix of its wrapper before each parameter."""
    content = torch.load(checkpoint, weights_only=True)
    kept = {key: content[key] for key in ("epoch", "arch", "best_prec1", "optimizer")}
    torch.save({**kept, "state_dict": {f"module.{key}": each for key, each in content["state_dict"].items()}}, path)
    return path


def test_train_script_resumes_run_of_original(finished: Run, tmp_path: Path) -> None:
    train = [str(finished.config), str(finished.data), "-j", "0", "-p", "1", "--epochs", "4"]
    theirs = _as_original(finished.checkpoint, tmp_path / "theirs.pth.tar")
    for name, source in (("ours", finished.checkpoint), ("theirs", theirs)):
        words = ["--log-dir", str(tmp_path / name), "--resume", str(source)]
        assert run_script(OriginalTrain, [*train, *words]) == 0
    ours, resumed = (
        torch.load(tmp_path / name / "checkpoint.pth.tar", weights_only=True) for name in ("ours", "theirs")
    )
    assert resumed["position"] == ours["position"] == {"epoch": 4, "batch": 0, "step": 12}
    assert all(torch.equal(value, resumed["state_dict"][key]) for key, value in ours["state_dict"].items())
    assert differences(ours["optimizer"], resumed["optimizer"]) == []
    assert resumed["best_prec1"] == ours["best_prec1"]


def _histograms(folder: Path) -> dict[str, list[Any]]:
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    return {name: events.Histograms(name) for name in events.Tags()["histograms"]}


@pytest.mark.parametrize("words", ["", "--log-hist"])
def test_histograms_are_written_every_ten_steps(finished: Run, tmp_path: Path, words: str) -> None:
    train = [str(finished.config), str(finished.data), "-j", "0", "--epochs", "4", "--log-dir", str(tmp_path)]
    assert run_script(OriginalTrain, [*train, *words.split()]) == 0
    names = ["bn_out.bias", "bn_out.weight", "classifier.fc.bias", "classifier.fc.weight"] if words else []
    found = _histograms(tmp_path)
    assert sorted(found) == names
    assert {name: [event.step for event in events] for name, events in found.items()} == {name: [10] for name in names}


def test_histograms_omit_non_finite_values(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("conv", "bn_out", "fc")})
    model["fc"].weight.data = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    model["fc"].bias.data.fill_(torch.nan)
    config = parse_experiment({"network": {"arch": "resnet18", "classes": 10}}, "test")
    with RunLog(tmp_path, 0, config) as log:
        log.begin(0, torch.device("cpu"), world_size=1, images={})
        for step in (10, 20):
            log.parameters(step, model)
    found = _histograms(tmp_path)
    assert sorted(found) == ["bn_out.bias", "bn_out.weight", "fc.weight"]
    assert [event.step for event in found["fc.weight"]] == [10, 20]
    histogram = found["fc.weight"][0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (2, 1, 2)


def test_requirements_of_scripts_are_dependencies_of_package() -> None:
    """The original's installation ended with ``cd scripts; pip install -r requirements.txt``."""
    root = Path(__file__).parents[1]
    listed = (root / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    dependencies = [line.strip(' ",') for line in listed.splitlines()]
    assert (root / "scripts" / "requirements.txt").read_text().splitlines() == dependencies
    assert dependencies[0].startswith("torch>=")


ORIGINAL_OPTIONS = {
    OriginalTrain: (
        "-j 2", "--workers 2", "-p 10", "--print-freq 10", "--resume PATH", "-e", "--evaluate", "--local_rank 0",
        "--local_rank=0", "--dist-backend nccl", "--dist-backend gloo", "--log-dir .", "--log-hist",
    ),
    ScoreImageNet: (
        "-j 4", "--workers 4", "-p 10", "--print-freq 10", "-c 224", "--crop 224", "-s 256", "--scale 256",
        "--ten_crops", "--local_rank 0", "--local_rank=0", "--dist-backend nccl", "--dist-backend gloo",
    ),
    SegmentVistas: (
        "--scales [0.7,1,1.2]", "--flip", "--fusion-mode mean", "--fusion-mode voting", "--fusion-mode max",
        "--output-mode palette", "--output-mode raw", "--output-mode prob",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("_no_local_rank")
@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for command, options in ORIGINAL_OPTIONS.items() for words in options]
)
def test_options_of_original_scripts_are_known(
    command: type[Command], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", lambda self: 0)
    files = ["CONFIG", "DATA"] if command is OriginalTrain else ["A", "B", "C"]
    assert run_script(command, [*words.split(), *files]) == 0
    assert run_script(command, [*files, *words.split()]) == 0
