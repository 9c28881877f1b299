"""Two files of predictions are compared image by image, or refused with the first image in which they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo.errors import DataError
from zoo.run.paired_predictions import score_files
from zoo.run.predictions import write_predictions
from zoo.tasks.prediction import Prediction


def _predictions(best: list[int], target: int = 0) -> list[Prediction]:
    """One prediction for each entry, the best class first; all images are of class ``target``."""
    classes = [tuple(sorted(range(6), key=lambda number: (number - first) % 6))[:5] for first in best]
    names = [f"val/a/{index:02}.png" for index in range(len(best))]
    return [Prediction(name, target, classes_of, (0.2,) * 5) for name, classes_of in zip(names, classes, strict=True)]


def _write(folder: Path, name: str, best: list[int], target: int = 0) -> Path:
    write_predictions(folder / name, _predictions(best, target))
    return folder / name


def test_scores_and_the_paired_test_are_those_of_a_hand_count(tmp_path: Path) -> None:
    """A has images 0 to 9 right and B 8 to 19. The best five of six classes lack 0 only where 1 is the best."""
    first = _write(tmp_path, "a.csv", [0] * 10 + [1] * 10)
    second = _write(tmp_path, "b.csv", [5] * 8 + [0] * 12)
    scored = score_files([first, second])
    assert [scored.scores(0), scored.scores(1)] == [{"top1": 50.0, "top5": 50.0}, {"top1": 60.0, "top5": 100.0}]
    tests = scored.tests
    assert [(test.count, test.only_first, test.only_second) for test in tests.values()] == [(20, 8, 10), (20, 0, 10)]
    table = scored.table("folders")
    assert "top-1: no difference is shown (10.00 ±" in table
    assert "top-5: B is better by 50.00 ±" in table
    content = json.loads(json.dumps(scored.to_json(), allow_nan=False))
    assert content["scores"][1]["standard_errors"]["top1"] == pytest.approx(100 * (0.6 * 0.4 / 20) ** 0.5)
    assert content["tests"]["top5"]["difference"] == 50.0
    assert content["tests"]["top5"]["p_value"] == pytest.approx(2 / 2**10)


def _refused(files: list[Path], message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_files(files)


def test_files_of_different_images_are_refused_with_the_first_of_them(tmp_path: Path) -> None:
    first, second = _write(tmp_path, "a.csv", [0] * 4), _write(tmp_path, "b.csv", [0] * 3)
    _refused([first, second], r"1 of .*a.csv are missing in .*b.csv, the first is val/a/03.png")
    _refused([second, first], r"1 of .*a.csv are missing in .*b.csv, the first is val/a/03.png")


def test_files_of_different_true_classes_are_refused_with_the_first_of_them(tmp_path: Path) -> None:
    first, second = _write(tmp_path, "a.csv", [0] * 4), _write(tmp_path, "b.csv", [0] * 4, target=1)
    _refused([first, second], r"val/a/00.png has class 0 in .*a.csv and class 1 in .*b.csv")


def test_files_with_different_numbers_of_classes_are_refused(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.csv", [0] * 4)
    write_predictions(
        tmp_path / "b.csv", [line._replace(classes=(0, 1), probabilities=(0.5, 0.5)) for line in _predictions([0] * 4)]
    )
    _refused([first, tmp_path / "b.csv"], "a.csv has 5 classes per image, and .*b.csv has 2")


HEAD = "path,target,class1,class2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the column path is missing"),
        ("path,class1\nx,1\n", "the column target is missing"),
        ("path,target\nx,1\n", "the column class1 is missing"),
        (HEAD, "the file has no predictions"),
        (f"{HEAD}x,1,2,3\ny,1,2\n", "a.csv, line 3"),
        (f"{HEAD}x,,2,3\n", "not have a path, a target and classes; .*line 2"),
        (f"{HEAD}x,1,2,-3\n", "not have a path, a target and classes; .*line 2"),
        (f"{HEAD}x,1,2,3\nx,1,2,3\n", "x is repeated; .*a.csv, line 3"),
        (f"{HEAD}x,1,2,{'3' * 5000}\n", "cannot be read: .*a.csv"),
    ],
)
def test_a_file_of_something_else_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    _refused([tmp_path / "a.csv"], message)


def test_by_the_labels_of_real_any_of_them_is_right_and_images_without_one_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.data.prepare.real_labels.NUM_IMAGES", 3)
    (tmp_path / "real.json").write_text("[[2, 3], [], [0]]")
    lines = _predictions([3, 0, 1])
    paths = [f"val/n01440764/ILSVRC2012_val_{number:08}.JPEG" for number in (1, 2, 3)]
    write_predictions(tmp_path / "a.csv", [line._replace(path=path) for line, path in zip(lines, paths, strict=True)])
    scored = score_files([tmp_path / "a.csv"], tmp_path / "real.json")
    assert (scored.scores(0), scored.count, scored.without_label) == ({"top1": 50.0, "top5": 50.0}, 2, 1)
    assert "1 more images have no label" in scored.table("ImageNet-ReaL")
    (tmp_path / "real.json").write_text("[[], [], []]")
    with pytest.raises(DataError, match=r"no image of .*a.csv has a label"):
        score_files([tmp_path / "a.csv"], tmp_path / "real.json")
