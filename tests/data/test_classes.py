"""Classes have names: ImageNet's for 1000, those of folders or a file where given, numbers otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.data.classes import class_names, imagenet_wnids
from zoo.errors import DataError


def test_a_thousand_classes_are_those_of_imagenet() -> None:
    names = class_names(1000)
    assert (len(names), names[0], names[281], names[999]) == (1000, "tench", "tabby", "toilet tissue")


def test_other_counts_have_numbers() -> None:
    assert class_names(3) == ["0", "1", "2"]


def test_names_from_the_weights_file_come_before_numbers_and_wnids_become_words() -> None:
    assert class_names(3, known=("cat", "dog")) == ["cat", "dog", "2"]
    assert class_names(1000, known=imagenet_wnids())[281] == "tabby"
    assert class_names(1000, known=["x"] * 1000) == ["x"] * 1000


def test_folders_give_the_names_in_the_order_of_the_data_set(tmp_path: Path) -> None:
    for name in ("b", "a", "C", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    assert class_names(3, tmp_path) == ["C", "a", "b"]


def test_a_text_file_gives_a_name_per_line(tmp_path: Path) -> None:
    (path := tmp_path / "names.txt").write_text("ünicorn\n\n t-shirt \n", encoding="utf-8")
    assert class_names(2, path) == ["ünicorn", "t-shirt"]


def test_another_number_of_names_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (path := tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"2 class names \(a, b\) but the network has 1000 classes; .*names.txt"):
        class_names(1000, path)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff\xfe\xff", "no UTF-8 text")])
def test_names_that_cannot_be_read_say_why(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "names.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        class_names(2, path)
