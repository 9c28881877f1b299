"""What torchrun does when a rank is killed: it starts the run again, which resumes exactly."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import free_port, run_distributed
from tests.engine.tiny import differences, make_images
from zoo.cli import main
from zoo.engine._checkpoint import CHECKPOINT, read

pytestmark = pytest.mark.dist

LIMIT_S = 300.0  # timeout of a whole run on a busy machine
KILL_AT = 9  # step to kill, out of 15; one step after a checkpoint
SETTINGS: dict[str, Any] = {
    "network": {"arch": "resnet32_cifar", "bn_mode": "sync", "classes": 2},
    "optimizer": {"batch_size": 12, "learning_rate": 0.01, "schedule": {"epochs": 3}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10},
    "checkpoint": {"every_steps": 2},
}
# torchrun otherwise keeps one store for all attempts, in which a restarted rank may find the addresses of dead ones.
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
# `zoo` whose rank 1 is killed once, as the kernel does when memory runs out.
PROGRAM = f"""
import os, signal, sys
from pathlib import Path
from zoo.cli import main
from zoo.engine import _trainer as trainer

folder, train_step = Path(__file__).parent, trainer.train_step

def killed_step(state, batch):
    train_step(state, batch)
    if state.step == {KILL_AT}:
        if state.process.rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

trainer.train_step = killed_step
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The arguments of `zoo` that train a small network, without the log folder."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tiny.json").write_text(json.dumps(SETTINGS))
    data = make_images(tmp_path / "data", num_train=60, num_val=11)
    return ["train", str(tmp_path / "tiny.json"), str(data), "-j", "0", "--resume", "auto", "--log-dir"]


@contextlib.contextmanager
def _torchrun(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_restarted_run_on_two_nodes_is_identical_to_uninterrupted_run(command: list[str], tmp_path: Path) -> None:
    """The two nodes are two launchers on this machine."""
    straight, restarted = tmp_path / "straight", tmp_path / "restarted"
    assert run_distributed(main, 2, [*command, str(straight)], group=False) == [0, 0]
    node = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "2", "--rdzv_backend", "c10d", "--rdzv_id", "1"]
    node += ["--rdzv_endpoint", f"localhost:{free_port()}", str(tmp_path / "program.py"), *command, str(restarted)]
    with _torchrun(*node) as first, _torchrun(*node) as second:
        printed = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(printed)
    assert (tmp_path / "killed").exists()
    text = (restarted / "training_0.log").read_text()
    assert "resumed from" in text, text
    assert differences(read(straight / CHECKPOINT), read(restarted / CHECKPOINT)) == []
