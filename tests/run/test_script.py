"""`zoo lean` runs training scripts like Python; their networks train lean, bit-identical to plain training."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.data.sample_images import make_folder
from tests.held import held_bytes
from tests.refusals import refused
from zoo.cli.lean import Lean, split_arguments
from zoo.errors import ConfigError
from zoo.remat._lean import lean
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


@pytest.mark.parametrize(("budget", "compare"), [(None, True), (0.5, False)])
@pytest.mark.parametrize("train", [train_one, train_student, train_two, train_parts])
@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
def test_bits_are_equal_to_plain_training(
    train: Callable[[], list[Tensor]], budget: float | None, compare: bool
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


@pytest.mark.parametrize(("sizes", "share"), [((24, 24, 24), 0.7), ((20, 22, 24), 0.8)])
def test_report_tells_saved_bytes(sizes: tuple[int, ...], share: float) -> None:
    """Calls with changing shapes are each recorded, and save recipes without a plan."""
    model, x = blocks(), images()
    with LeanCalls() as calls:
        for size in sizes:
            model(torch.randn(8, 3, size, size)).sum().backward()
    plain, lean_bytes = calls.networks[0].budget.limiter.saved_bytes()
    assert plain == pytest.approx(held_bytes(lambda: model(x).sum()) + x.nbytes, rel=0.02)
    assert lean_bytes < share * plain
    if len(set(sizes)) > 1:
        held = held_bytes(lambda: lean(copy.deepcopy(model))(x).sum())
        assert lean_bytes == pytest.approx(held + x.nbytes, rel=0.05)
    assert f"{lean_bytes / plain:.2f}" in calls.report()


class Sized(nn.Module):
    """Calls its part to learn the size of its output, like detectors for their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()
        self.head = nn.Linear(self.body(images()).flatten(1).shape[1], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def test_calls_without_backward_are_not_reported() -> None:
    with LeanCalls() as calls:
        model = Sized()
        assert "no module" in calls.report()
        for _ in range(2):
            model(images()).sum().backward()
    assert "Sequential" not in calls.report()
    assert "Sized" in calls.report()


def test_output_without_graph_is_not_watched() -> None:
    """A network may return its parameter, an input, or nothing that requires gradients."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return self.weight, x, {"loss": (self.weight * x).sum()}, "text"

    with LeanCalls() as calls:
        Odd()(torch.ones(2))[2]["loss"].backward()
    assert [each.is_trained for each in calls.networks] == [True]


def test_calls_run_plainly_after_context() -> None:
    before = nn.Module.__call__
    with pytest.raises(ZeroDivisionError), LeanCalls():
        raise ZeroDivisionError
    assert nn.Module.__call__ is before


def test_networks_that_are_not_made_lean_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # the mark of a compiled module is enough
    with LeanCalls() as calls:
        lean(blocks(), 0.5)(images()).sum().backward()  # has a budget of its own
        nn.MSELoss()(images().requires_grad_(), images()).backward()
        assert calls.networks == []
        assert "no module" in calls.report()
        model = blocks()
        model.compile(backend="eager")
        model(images()).sum().backward()
    assert "Sequential" in calls.report()
    assert "torch.compile" in calls.report()


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


@pytest.mark.parametrize(("budget", "expected"), [(None, None), ("0.4", 0.4), ("40%", "40%"), ("1.5GB", "1.5GB")])
def test_command_passes_budget_as_fraction_or_text(
    budget: str | None, expected: float | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = mock.Mock(return_value=7)
    monkeypatch.setattr(script, "run_script", ran)
    assert Lean(script="train.py", budget=budget, compare=True, arguments=("--lr", "1")).run() == 7
    target, is_module, arguments, calls = ran.call_args.args
    assert (target, is_module, arguments, calls.options) == ("train.py", False, ("--lr", "1"), (expected, True))


@pytest.mark.parametrize("budget", ["8 bananas", "1.5"])
def test_invalid_budget_raises(budget: str) -> None:
    refused(ConfigError, lambda: LeanCalls(budget), budget)


# Scripts in separate processes

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
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train.py --steps 4", 0),
        ("-m package.train --steps 4", 0),
        ("package/train.py --steps 4", 0),
        ("train.py --end raise", 1),
        ("train.py --end exit", 7),
    ],
)
def test_script_runs_and_ends_as_in_python(folder: Path, command: str, code: int) -> None:
    plain, found = run(folder, *command.split(), lean=False), run(folder, *command.split())
    assert found.returncode == plain.returncode == code
    assert found.stdout == plain.stdout
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


def test_commands_of_packages_are_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, binary = folder / "train-net", folder / "train-bin"
    command.write_text("#!/usr/bin/env python3\n")
    binary.write_bytes(b"\x7fELF\0")
    for path in (command, binary):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert script._find_script("train-net") == str(command)
    refused(ConfigError, lambda: script._find_script("train-bin"), "train-bin")


# Scripts on packages, which print a digest of the weights that they have trained

DIGEST = """
import numpy, torch
numpy.random.seed(0)
torch.manual_seed(0)
def show(model):
    print("sum", sum(each.double().sum().item() for each in model.parameters()).hex())
"""
OF_TIMM = """
import timm, timm.optim, timm.loss, timm.data, timm.utils
model = timm.create_model("resnet18", num_classes=4)
average = timm.utils.ModelEmaV3(model)
optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3)
mixup = timm.data.Mixup(mixup_alpha=0.2, num_classes=4)
criterion = timm.loss.SoftTargetCrossEntropy()
for step in range(3):
    images, targets = mixup(torch.randn(4, 3, 64, 64), torch.randint(4, (4,)))
    criterion(model(images), targets).backward()
    timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.update(model, step=step)
with torch.no_grad():
    average(images)
show(model)
"""
OF_TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
data = [{"input_ids": (ids := torch.randint(200, (64,))), "labels": ids} for _ in range(16)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=64, n_layer=2, n_head=2, n_positions=64))
args = TrainingArguments("runs", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3,
                         use_cpu=True, report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True)
Trainer(model=model, args=args, train_dataset=data, eval_dataset=data).train()
show(model)
"""
OF_LIGHTNING = """
import lightning, torchvision
from torch.utils.data import DataLoader, TensorDataset
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torchvision.models.resnet18(num_classes=4)
    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = TensorDataset(torch.randn(12, 3, 64, 64), torch.randint(4, (12,)))
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False)
model = Net()
trainer.fit(model, DataLoader(data, batch_size=4))
show(model)
"""
OF_ACCELERATE = """
import torchvision
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
model = torchvision.models.resnet18(num_classes=4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 3, 64, 64), torch.randint(4, (16,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for images, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), targets))
        optimizer.step()
        optimizer.zero_grad()
show(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "code", "network"),
    [
        ("timm", OF_TIMM, "ResNet"),
        ("transformers", OF_TRANSFORMERS, "GPT2LMHeadModel"),
        ("lightning", OF_LIGHTNING, "ResNet"),
        ("accelerate", OF_ACCELERATE, "ResNet"),
    ],
)
def test_scripts_on_packages_train_the_same_weights(tmp_path: Path, package: str, code: str, network: str) -> None:
    pytest.importorskip(package)
    (tmp_path / "train.py").write_text(DIGEST + code)
    plain, found = run(tmp_path, "train.py", lean=False), run(tmp_path, "train.py")
    sums = [re.findall("^sum .*", each.stdout, re.MULTILINE) for each in (plain, found)]
    assert (plain.returncode, found.returncode) == (0, 0), found.stderr
    assert sums[0] == sums[1]
    assert len(sums[0]) == 1
    (row,) = re.findall(rf"^\| {network},.*\| +(0\.\d+) \|$", found.stderr, re.MULTILINE)
    assert float(row) < 0.7


@pytest.mark.slow
def test_command_of_ultralytics_trains_lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constructors call parts of the network to learn strides; its batches have names and ever other targets."""
    pytest.importorskip("ultralytics")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    for split in ("train", "val"):
        make_folder(tmp_path / "images" / split, {"a": 4})
        labels = tmp_path / "labels" / split / "a"
        labels.mkdir(parents=True)
        for path in (tmp_path / "images" / split / "a").iterdir():
            (labels / f"{path.stem}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: [a]\n")
    words = "detect train model=yolov8n.yaml data=data.yaml epochs=2 imgsz=64 batch=2 workers=0 device=cpu plots=False"
    found = run(tmp_path, str(Path(sys.executable).parent / "yolo"), *words.split(), "amp=False", "project=runs")
    assert found.returncode == 0, found.stderr
    ((name, share),) = re.findall(r"^\| (\w+),.*\| +(\d\.\d+) \|$", found.stderr, re.MULTILINE)
    assert name == "DetectionModel"
    assert float(share) < 0.7


@pytest.mark.dist
def test_torchrun_runs_script_in_each_process(folder: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zoo", "lean", "train.py", "--steps", "3"]
    found = run(folder, *command, lean=False)
    assert found.returncode == 0
    assert found.stdout.count("sum") == 2
    assert found.stderr.count("zoo lean:") == 1
