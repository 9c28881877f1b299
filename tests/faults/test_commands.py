"""A command ends in one line and with its own exit code, whoever stops it and wherever its output goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import zoo
from zoo.cli import main

# A command that reports its start and then works for a long time, like a download or a validation.
# Shells make background processes ignore Ctrl-C, and their children inherit this.
SLOW = """
import signal, time
from zoo.cli import Doctor, main
signal.signal(signal.SIGINT, signal.default_int_handler)
def run(args):
    print("working", flush=True)
    time.sleep(60)
Doctor.run = run
raise SystemExit(main(["doctor", *{arguments!r}]))
"""


def interrupted(*arguments: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.format(arguments=arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


def test_ctrl_c_ends_any_command_with_one_line_and_130() -> None:
    done = interrupted()
    assert (done.returncode, done.stderr) == (130, "zoo doctor: interrupted\n")


def test_closed_pipe_ends_command_silently() -> None:
    code = "from zoo.cli import Doctor, main; Doctor.run = lambda args: print('line\\n' * 200000) or 0; "
    code += "raise SystemExit(main(['doctor']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), errors) == (141, "")


@pytest.mark.parametrize("rank", ["x", "-1", "1" * 5000, ""])
def test_invalid_rank_does_not_prevent_command(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert main(["settings"]) == 0
    assert capsys.readouterr().err == ""


def test_ascii_output_escapes_other_characters() -> None:
    code = "from zoo.cli import Doctor, main; Doctor.run = lambda args: print('Kühe\\udcff') or 0; main(['doctor'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "K\\xfche\\udcff\n", "")


def test_version_is_printed_without_importing_torch() -> None:
    code = "import sys; sys.argv = ['zoo', '--version']; from zoo.cli import main\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"zoo {zoo.__version__}\n"


def test_zoo_alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    alone = capsys.readouterr().err
    assert "validate" in alone
