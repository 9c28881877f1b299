"""`zoo segment` and the original's test script, from the arguments to the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from scripts.test_vistas import SegmentVistas
from tests.data.sample_images import random_image
from tests.dist.spawn import free_port
from zoo.cli import main, run_script
from zoo.tasks.tta import TestTimeAugmentation as Augmentation
from zoo.tasks.tta import segment

SETTINGS = {
    "network": {"arch": "deeplab_resnet18", "activation": "leaky_relu", "bn_mode": "inplace", "classes": 65},
    "segmentation": {"layout": "vistas", "longest_side_val": 48},
}


class Files(NamedTuple):
    """An experiment, weights for it as a snapshot of body, head and cls, and a folder of images."""

    config: Path
    snapshot: Path
    images: Path
    model: zoo.models.Network


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("segment")
    (config := root / "tiny.json").write_text(json.dumps(SETTINGS))
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", norm="inplace", num_classes=65).eval()
    parts = {part: getattr(model, part).state_dict() for part in ("body", "head", "cls")}
    torch.save({"state_dict": parts}, root / "snapshot.pth")
    for seed, name in enumerate(("a.png", "sub/b.JPG", "c.webp")):
        (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        random_image(seed, 40, 60).save(root / "in" / name)
    return Files(config, root / "snapshot.pth", root / "in", model)


def _run(command: str, *words: object) -> int:
    return main([command, *map(str, words)])


def _run_script(*words: object) -> int:
    return run_script(SegmentVistas, [*map(str, words)])


def _segment(files: Files, out: Path, *words: object) -> int:
    return _run("segment", files.config, files.images, out, "--weights", files.snapshot, *words)


def _written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_segment_writes_what_was_asked_for_and_says_how_many(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--output", "palette,prob", "--overlay", "--scales", "0.5,1", "--flip", "--fusion", "voting")
    assert _segment(files, tmp_path / "new" / "out", *options) == 0
    output = capsys.readouterr()
    assert "3 of 3 images segmented" in output.out
    folders = {"palette": "png", "prob": "npz", "overlay": "png"}
    expected = {f"{kind}/{name}.{end}" for kind, end in folders.items() for name in ("a", "sub/b", "c")}
    assert _written(tmp_path / "new" / "out") == expected
    with Image.open(tmp_path / "new" / "out" / "palette" / "a.png") as image:
        assert image.size == (40, 60)
        assert image.getpalette("RGB")[:3] == [0xA5, 0x2A, 0x2A]  # of Vistas, as its layout is the experiment's
    assert _segment(files, tmp_path / "new" / "out", *options) == 0
    assert "0 of 0 images segmented" in (text := capsys.readouterr().out)
    assert "3 already had files" in text


def test_segment_goes_on_after_a_broken_image_and_exits_with_code_2(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images := tmp_path / "in").mkdir()
    random_image(0).save(images / "a.png")
    (images / "broken.png").write_bytes(b"no image")
    assert _run("segment", files.config, images, tmp_path / "out", "--weights", files.snapshot) == 2
    output = capsys.readouterr()
    assert "1 of 2 images segmented" in output.out
    assert "broken.png" in output.err
    assert "1 of 2 images could not be segmented and are listed above" in output.err
    assert _written(tmp_path / "out") == {"palette/a.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scales", "1,0"), "scales = 1.0, 0.0: give one or more numbers above 0"),
        (("--scales", "1,1.0"), "1.0 is repeated"),
        (("--longest-side", "100000"), "longest_side = 100000: give a number from 1 to 9459"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert _run("segment", "no-such-network", tmp_path, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "1,", "1 2", "-1", "1e400", "nan", "__import__('os').abort()", "(1", "0x1"])
def test_scales_are_parsed_and_never_evaluated(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        _run("segment", "a", "b", "c", f"--scales={text}")
    assert error.value.code == 2
    assert "is not a list of numbers" in capsys.readouterr().err


@pytest.fixture
def vistas(files: Files, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A network of 11 million parameters takes the place of the published one, which has 136."""
    monkeypatch.setattr("scripts.test_vistas.NETWORK", str(files.config))
    return files


def _test_vistas(files: Files, out: Path, *words: object) -> int:
    return _run_script(files.snapshot, files.images, out, *words)


def test_the_script_writes_the_originals_files_with_the_originals_defaults(vistas: Files, tmp_path: Path) -> None:
    assert _test_vistas(vistas, tmp_path / "out") == 0
    assert _written(tmp_path / "out") == {"a.png", "sub/b.png", "c.png"}
    model, settings = vistas.model, zoo.config.Input()
    image = random_image(0, 40, 60).resize((32, 48), Image.Resampling.BILINEAR)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (settings.mean, settings.std))
    tensor = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std
    expected = segment(model.forward_logits, tensor, Augmentation((0.7, 1.0, 1.2)))
    resized = Image.fromarray(expected.classes.numpy().astype(np.uint8)).resize((40, 60), Image.Resampling.NEAREST)
    with Image.open(tmp_path / "out" / "a.png") as written:
        assert written.mode == "L"
        assert np.array_equal(np.asarray(written), np.asarray(resized))


def test_a_rank_of_the_script_takes_its_share(
    vistas: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = []
    for rank in range(2):
        assert _test_vistas(vistas, tmp_path / str(rank), "--world-size", 2, "--rank", rank, "--scales", "1") == 0
        shares.append(_written(tmp_path / str(rank)))
    assert sorted(map(len, shares)) == [1, 2]
    assert set.union(*shares) == {"a.png", "sub/b.png", "c.png"}
    assert "2 of 2 images segmented" in (text := capsys.readouterr().out)
    assert "1 of 1 images segmented" in text


def test_the_script_starts_a_process_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 0

        def terminate(self) -> None:
            pass

    monkeypatch.setattr("scripts.test_vistas.subprocess.Popen", Process)
    monkeypatch.setattr("sys.argv", ["scripts/test_vistas.py"])
    assert _run_script("s", "in", "out", "--world-size", 2, "--flip", "--scales", "1,2") == 0
    given = ["s", "in", "out", "--world-size", "2", "--flip", "--scales", "1,2"]
    expected = [["scripts/test_vistas.py", "--world-size", "2", "--rank", str(rank), *given] for rank in range(2)]
    assert [command[1:] for command in commands] == expected


@pytest.mark.parametrize(
    ("words", "launched", "message"),
    [
        (("--world-size", "2", "--rank", "2"), False, "--rank 2 is not one of the 2 processes"),
        (("--world-size", "2"), True, "a launcher set rank and world size"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    launched: bool,
    message: str,
) -> None:
    if launched:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
            monkeypatch.setenv(name, str(value))
    assert _run_script("s", tmp_path, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
