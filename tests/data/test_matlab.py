"""MATLAB files are read as MATLAB writes them, and damaged ones are errors."""

from __future__ import annotations

import pytest

from tests.data.distributed import matlab_file
from zoo.data.matlab import read_structs
from zoo.errors import DataError

ROWS = [
    {"ID": 1, "name": "wörds, of two", "children": None, "count": 732},
    {"ID": 2, "name": "a", "children": None, "count": 1300},
    {"ID": 3, "name": "", "children": None, "count": 255},
]


@pytest.mark.parametrize("compressed", [False, True])
def test_texts_and_numbers_of_each_struct_are_read(compressed: bool) -> None:
    assert read_structs(matlab_file("synsets", ROWS, compressed), "synsets") == ROWS


def test_an_array_of_another_name_is_not_taken_for_it() -> None:
    with pytest.raises(DataError, match="it has no array of structs 'synsets'"):
        read_structs(matlab_file("others", ROWS), "synsets")


def test_other_formats_are_refused() -> None:
    for content in (b"", b"text", matlab_file("a", ROWS).replace(b"\0\1IM", b"\1\0MI")):
        with pytest.raises(DataError, match="it is no little-endian MATLAB file of version 5"):
            read_structs(content, "a")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_is_cut_off_anywhere_is_an_error(compressed: bool) -> None:
    content = matlab_file("a", ROWS, compressed)
    for size in range(128, len(content) - 1, 7):
        with pytest.raises(DataError, match="a MATLAB file cannot be read"):
            read_structs(content[:size], "a")
