"""Installation never fails for the lack of a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml needs for a build

ROOT = Path(__file__).parents[1]


def test_without_a_working_compiler_the_kernels_are_left_out_with_a_word(tmp_path):
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "temp"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CC": "false", "CXX": "false"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the CPU kernels are left out, plain torch stands in" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))
