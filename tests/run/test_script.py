"""`zoo lean` runs training scripts as Python does, and their networks train lean with the bits of plain training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.held import held_bytes
from zoo.cli.lean import split_arguments
from zoo.errors import ConfigError
from zoo.remat.lean import lean
from zoo.run import script
from zoo.run.script import PERIOD, LeanCalls


def blocks(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.Dropout(), nn.GELU()
    )


def images() -> Tensor:
    return torch.randn(8, 3, 24, 24)


def train_one() -> list[Tensor]:
    """A network, a criterion, an evaluation after each step, and accumulated gradients."""
    torch.manual_seed(0)
    model, criterion = blocks(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        output = model(images())
        criterion(output, torch.zeros_like(output)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(images())
        model.train()
    return [*model.parameters(), *model.buffers()]


def train_student() -> list[Tensor]:
    """A student whose features a frozen teacher scores, with gradients through the teacher."""
    torch.manual_seed(0)
    student, teacher = nn.Conv2d(3, 3, 3, padding=1), blocks().requires_grad_(False).eval()
    optimizer = torch.optim.Adam(student.parameters())
    for _ in range(3):
        teacher(student(images())).square().mean().backward()
        optimizer.step()
    return list(student.parameters())


def train_two() -> list[Tensor]:
    """A generator and a discriminator in turn."""
    torch.manual_seed(0)
    generator, discriminator = nn.Sequential(nn.Conv2d(3, 16, 1), nn.GELU(), nn.Conv2d(16, 3, 1)), blocks()
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (generator, discriminator)]
    for _ in range(3):
        discriminator(generator(images()).detach()).mean().backward()
        optimizers[1].step()
        discriminator(generator(images())).mean().neg().backward()
        optimizers[0].step()
    return [*generator.parameters(), *discriminator.parameters()]


def train_parts() -> list[Tensor]:
    """A network whose parts the script calls one by one, one of them in a checkpoint."""
    torch.manual_seed(0)
    first, second = blocks(), nn.Sequential(nn.Conv2d(32, 8, 1), nn.SiLU(), nn.Conv2d(8, 1, 1))
    for _ in range(3):
        checkpoint(second, first(images()), use_reentrant=False).sum().backward()
    return [each.grad for each in (*first.parameters(), *second.parameters()) if each.grad is not None]


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("train", [train_one, train_student, train_two, train_parts])
@pytest.mark.filterwarnings("ignore::zoo.remat.limit.BelowFloor")
def test_bits_are_equal_to_plain_training(
    train: Callable[[], list[Tensor]], compare: bool, budget: float | None
) -> None:
    expected = train()
    with LeanCalls(budget, compare):
        found = train()
    assert all(map(torch.equal, found, expected))


def test_outermost_modules_with_gradients_are_counted() -> None:
    with LeanCalls() as calls:
        train_one()
        train_two()
    assert [(each.title.split(",")[0], each.num_calls) for each in calls.networks] == [
        ("Sequential", 4), ("Sequential", 6), ("Sequential", 6),
    ]  # fmt: skip


def test_report_tells_saved_bytes() -> None:
    model = blocks()
    with LeanCalls() as calls:
        for _ in range(3):
            model(images()).sum().backward()
    plain, lean_bytes = calls.networks[0].budget.limiter.saved_bytes()
    x = images()
    assert plain == pytest.approx(held_bytes(lambda: model(x).sum()) + x.nbytes, rel=0.02)
    assert lean_bytes < 0.7 * plain
    assert f"{lean_bytes / plain:.2f}" in calls.report()


def test_calls_are_plain_afterwards() -> None:
    before = nn.Module.__call__
    with pytest.raises(ZeroDivisionError), LeanCalls():
        raise ZeroDivisionError
    assert nn.Module.__call__ is before


def test_lean_modules_of_script_keep_their_budget() -> None:
    model = lean(blocks(), 0.5)
    with LeanCalls() as calls:
        model(images()).sum().backward()
    assert calls.networks == []


def test_compiled_network_is_named_with_reason() -> None:
    model = blocks()
    model.compile(backend="eager")
    with LeanCalls() as calls:
        model(images()).sum().backward()
    assert "Sequential" in calls.report()
    assert "torch.compile" in calls.report()


def test_report_without_networks_says_so() -> None:
    with LeanCalls() as calls:
        nn.MSELoss()(images().requires_grad_(), images()).backward()
    assert "no module" in calls.report()


def test_comparison_times_plain_and_lean_steps() -> None:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with LeanCalls(compare=True) as calls:
        for _ in range(2 * PERIOD):
            model(images()).sum().backward()
            optimizer.step()
    assert re.search(r"step: [\d.]+ ms lean, [\d.]+ ms plain", calls.report())


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ("lean train.py --lr 1", "lean train.py", "--lr 1"),
        ("lean --budget 8GB --compare train.py -m x --budget", "lean --budget 8GB --compare train.py", "-m x --budget"),
        ("lean -m pkg.train --lr 1", "lean -m pkg.train", "--lr 1"),
        ("lean --budget=0.4 -m pkg.train train.py", "lean --budget=0.4 -m pkg.train", "train.py"),
        ("--local-rank=1 lean train.py --x", "lean train.py", "--local-rank=1 --x"),
        ("lean --help", "lean --help", ""),
        ("lean", "lean", ""),
    ],
)  # fmt: skip
def test_arguments_after_script_belong_to_script(words: str, own: str, others: str) -> None:
    assert split_arguments(words.split()) == (own.split(), tuple(others.split()))


@pytest.mark.parametrize("budget", ["8 bananas", "1.5"])
def test_invalid_budget_raises(budget: str) -> None:
    with pytest.raises(ConfigError, match=budget):
        LeanCalls(budget)


# Scripts in processes of their own

SCRIPT = """
import argparse, os, sys, time
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    def forward(self, x):
        return self.layers(x)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--end", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Head()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(args.steps):
        model(torch.randn(8, 3, 24, 24)).square().mean().backward()
        optimizer.step()
    print("sum", sum(each.double().sum().item() for each in model.parameters()).hex())
    print("in", os.path.basename(sys.path[0]), sys.argv[1:], __name__, os.path.basename(__file__), flush=True)
    if args.end == "raise":
        raise ValueError("the end")
    if args.end == "exit":
        sys.exit(7)
    if args.end == "wait":
        time.sleep(60)

if __name__ == "__main__":
    main()
"""


def run(folder: Path, *command: str, lean: bool = True) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *(["-m", "zoo", "lean"] if lean else []), *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "folder" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for path in (package / "train.py", tmp_path / "folder" / "train.py"):
        path.write_text(SCRIPT)
    return tmp_path / "folder"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("train.py",), ("-m", "package.train"), ("package/train.py",)])
def test_script_runs_as_in_python(folder: Path, command: tuple[str, ...]) -> None:
    words = (*command, "--steps", "4")
    plain, found = run(folder, *words, lean=False), run(folder, *words)
    assert (found.returncode, found.stdout) == (plain.returncode, plain.stdout) == (0, plain.stdout)
    assert "Head" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("exit", 7)])
def test_script_ends_with_its_own_exit_code_and_traceback(folder: Path, end: str, code: int) -> None:
    plain, found = run(folder, "train.py", "--end", end, lean=False), run(folder, "train.py", "--end", end)
    assert found.returncode == plain.returncode == code
    assert "Head" in found.stderr  # the report
    assert found.stderr.endswith(plain.stderr)
    assert script.__file__ not in found.stderr


@pytest.mark.slow
def test_interrupt_ends_script_with_report(folder: Path) -> None:
    words = [sys.executable, "-m", "zoo", "lean", "train.py", "--end", "wait"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("in"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "Head" in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_missing_script_exits_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.cli import main

    assert main(["lean", str(folder / "trian.py")]) == 2
    assert "trian.py" in capsys.readouterr().err


@pytest.mark.dist
def test_torchrun_runs_script_in_each_process(folder: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zoo", "lean", "train.py", "--steps", "3"]
    found = run(folder, *command, lean=False)
    assert found.returncode == 0
    assert found.stdout.count("sum") == 2
    assert found.stderr.count("zoo lean:") == 1
