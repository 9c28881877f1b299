"""Tables are aligned Markdown."""

from __future__ import annotations

from zoo.report.tables import markdown_table


def test_columns_are_padded_and_numbers_stand_right() -> None:
    table = markdown_table(["model", "top-1"], [["resnet18", 9.5], ["wider_resnet38", 79.716], ["x", None]])
    assert table.splitlines() == [
        "| model          | top-1 |",
        "| -------------- | ----: |",
        "| resnet18       |  9.50 |",
        "| wider_resnet38 | 79.72 |",
        "| x              |       |",
    ]


def test_a_column_with_one_text_stands_left() -> None:
    assert markdown_table(["n"], [[1], ["many"]]).splitlines()[2:] == ["| 1    |", "| many |"]


def test_bars_in_cells_do_not_open_new_columns() -> None:
    assert markdown_table(["a"], [["|w| + eps"]]).splitlines()[2] == "| \\|w\\| + eps |"


def test_a_table_without_rows_still_has_its_head() -> None:
    assert markdown_table(["a", "long"], []).splitlines() == ["| a   | long |", "| --- | ---- |"]
