"""MATLAB files are read as MATLAB writes them, and damaged ones are errors."""

from __future__ import annotations

import re
import struct
import zlib

import numpy as np
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


@pytest.mark.parametrize("compressed", [False, True])
def test_random_damage_gives_structs_or_one_error(compressed: bool) -> None:
    """Of 3,000 damaged files none raises anything but DataError, nor takes long."""
    generator = np.random.default_rng(0)
    whole = np.frombuffer(matlab_file("a", ROWS, compressed), dtype=np.uint8)
    body = whole[128:]
    if compressed:  # the damage is in what was compressed
        body = np.frombuffer(zlib.decompress(whole[136:].tobytes()), dtype=np.uint8)
    messages = []
    for _ in range(3000):
        damaged = body.copy()
        places = generator.integers(0, len(body), size=generator.integers(1, 6))
        damaged[places] = generator.choice([0, 1, 2, 8, 14, 15, 127, 128, 255], size=len(places))
        content = damaged.tobytes()
        if compressed:
            packed = zlib.compress(content)
            content = struct.pack("<II", 15, len(packed)) + packed
        try:
            read_structs(whole[:128].tobytes() + content, "a")
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 1000
    assert all(re.fullmatch("a MATLAB file cannot be read: .+", message) for message in messages)


def test_structs_without_fields_are_refused_whatever_their_number() -> None:
    content = matlab_file("a", [{}], compressed=False)
    with pytest.raises(DataError, match="its structs have no fields"):
        read_structs(content, "a")
