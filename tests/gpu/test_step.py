"""Training steps on a GPU do not synchronize with the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.tiny import build_net, make_config
from tests.synchronization import no_synchronization
from zoo.engine._process import Process, open_process
from zoo.engine._state import TrainState, build_state
from zoo.engine._step import StepBatch, train_step
from zoo.layers import InPlaceABN
from zoo.tasks import task_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _state(process: Process, fused: bool = False, **training: Any) -> TrainState:
    config = make_config(training=training, optimizer={"ema_decay": 0.9, "accumulate_steps": 2, "clip": 1.0})
    net = build_net(config.network)
    if fused:
        net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), InPlaceABN(3), net)
    return build_state(task_of(config), net, process)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_step_never_synchronizes_with_device(amp: str, fused: bool) -> None:
    with open_process() as process:
        state = _state(process, fused, amp=amp, channels_last=True)
        images = torch.randn(8, 3, 8, 8, device=process.device)
        batch = StepBatch(images, torch.arange(8, device=process.device) % 2, global_size=8)
        for _ in range(2):  # the first steps compile and allocate
            train_step(state, batch)
        with no_synchronization():
            for _ in range(3):
                train_step(state, batch)
        assert state.meter.read().count == 5 * 8
        assert state.meter.read().first_bad_step is None
