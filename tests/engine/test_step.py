"""A step follows the gradient of the mean over the global batch, however the batch is divided."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dist.spawn import run_distributed
from tests.engine.tiny import make_config, new_state, this_process
from zoo.engine._digest import digest, state_tensors
from zoo.engine._state import TrainState, broadcast_buffers, load_shared_state, shared_state
from zoo.engine._step import StepBatch, train_step
from zoo.engine._wrapping import distribute

CLASSES = 5


def _net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.LeakyReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(6 * 4, CLASSES)
    )


def _batch(num_images: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_images, 3, 4, 4, generator=generator)
    return images, torch.randint(CLASSES, (num_images,), generator=generator)


def _state(training: dict[str, Any] | None = None, **optimizer: Any) -> TrainState:
    settings = {"learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "ema_decay": None}
    config = make_config(optimizer={**settings, **optimizer}, training=training or {})
    return new_state(config, _net())


def _weights(state: TrainState) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in state.model.parameters()])


def _gradient(images: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the gradient of the mean loss, by autograd alone."""
    model = _net()
    loss = F.cross_entropy(model(images), targets, label_smoothing=smoothing)
    return torch.cat([gradient.reshape(-1) for gradient in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("options", [{"type": "SGD", "momentum": 0.9}, {"type": "AdamW", "weight_decay": 0.1}])
@pytest.mark.parametrize("parts", [1, 3])
def test_released_gradients_are_bit_identical_to_stored_gradients(options: dict[str, Any], parts: int) -> None:
    images, targets = _batch(12)
    found = []
    for release in (False, True):
        state = _state(accumulate_steps=parts, batch_size=12, ema_decay=0.9, release_gradients=release, **options)
        for _ in range(4):
            train_step(state, StepBatch(images, targets, global_size=12))
            parameters = list(state.model.parameters())
            num_bytes = sum(each.grad.nbytes for each in parameters if each.grad is not None)
            assert (num_bytes <= 0.02 * sum(each.nbytes for each in parameters)) is release
        saved = shared_state(state)
        resumed = _state(accumulate_steps=parts, batch_size=12, ema_decay=0.9, release_gradients=release, **options)
        load_shared_state(resumed, copy.deepcopy(saved))
        for each in (state, resumed):
            train_step(each, StepBatch(images, targets, global_size=12))
        found += [digest(state_tensors(shared_state(each))) for each in (state, resumed)]
    assert len({*found}) == 1


def test_meter_receives_every_micro_batch_with_its_step() -> None:
    images, targets = _batch(10)
    state = _state(accumulate_steps=3, batch_size=30)
    with torch.no_grad():
        expected = F.cross_entropy(state.model(images), targets).item()
    train_step(state, StepBatch(images, targets, global_size=10))
    reading = state.meter.read()
    assert reading.count == 10
    assert reading.loss == pytest.approx(expected, rel=1e-6)
    images[4] = float("inf")
    train_step(state, StepBatch(images, targets, global_size=10))
    assert state.meter.read().first_bad_step == 2


def test_clipping_limits_norm_of_the_whole_gradient() -> None:
    images, targets = _batch(10)
    gradient = _gradient(images, targets)
    state = _state(clip=0.01)
    before = _weights(state).clone()
    train_step(state, StepBatch(images, targets, global_size=10))
    torch.testing.assert_close(_weights(state), before - 0.1 * 0.01 * gradient / gradient.norm(), atol=1e-6, rtol=0)


def test_moving_average_follows_weights_and_copies_buffers() -> None:
    images, targets = _batch(10)
    config = make_config(optimizer={"ema_decay": 0.75, "momentum": 0.0})
    state = new_state(config, nn.Sequential(nn.BatchNorm2d(3), _net()))
    seen = []
    for _ in range(3):
        train_step(state, StepBatch(images, targets, global_size=10))
        seen.append(_weights(state).clone())
    expected = 0.75 * (0.75 * seen[0] + 0.25 * seen[1]) + 0.25 * seen[2]
    assert state.ema is not None
    averaged = nn.utils.parameters_to_vector(state.ema.parameters()).detach()
    torch.testing.assert_close(averaged, expected)
    broadcast_buffers(state)
    for buffer, own in zip(state.ema.buffers(), state.model.buffers(), strict=True):
        assert torch.equal(buffer, own)


def test_average_is_updated_every_few_batches_of_epoch() -> None:
    images, targets = _batch(10)
    state = _state(ema_decay=0.75, ema_every=3)
    assert state.ema is not None
    expected = None
    for number in range(10):
        state.batch = number % 5  # epochs of five batches
        train_step(state, StepBatch(images, targets, global_size=10))
        if number in (0, 3, 5, 8):
            expected = _weights(state) if expected is None else 0.75 * expected + 0.25 * _weights(state)
        torch.testing.assert_close(nn.utils.parameters_to_vector(state.ema.parameters()), expected)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_steps_are_close_to_full_precision(amp: str) -> None:
    images, targets = _batch(10)
    state = _state({"amp": amp})
    before = _weights(state).clone()
    train_step(state, StepBatch(images, targets, global_size=10))
    moved, expected = before - _weights(state), 0.1 * _gradient(images, targets)
    assert _weights(state).dtype == torch.float32
    assert (moved - expected).norm() < 0.02 * expected.norm()
    assert not torch.equal(moved, expected)
    assert state.scaler.is_enabled() == (amp == "fp16")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # inductor of torch 2.11
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_channels_last_and_torch_compile_make_the_same_step(compiled: bool) -> None:
    images, targets = _batch(10)
    states = [_state(), _state({"channels_last": True, "compile": compiled})]
    for state in states:
        train_step(state, StepBatch(images, targets, global_size=10))
    torch.testing.assert_close(_weights(states[1]), _weights(states[0]))
    assert list(states[1].model.state_dict()) == list(_net().state_dict())
    assert states[1].model[0].weight.is_contiguous(memory_format=torch.channels_last)


def _step_of_rank(bounds: list[int], parts: int) -> tuple[Tensor, int, int]:
    images, targets = _batch(bounds[-1])
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = _state(accumulate_steps=parts, batch_size=30, label_smoothing=0.1)
    chosen = slice(*bounds[rank : rank + 2])
    train_step(state, StepBatch(images[chosen], targets[chosen], global_size=bounds[-1]))
    return _weights(state), state.step, state.batch


@pytest.mark.parametrize(
    ("bounds", "parts"),
    [
        *[([0, 10], parts) for parts in (1, 2, 3, 5)],
        *[
            pytest.param(bounds, parts, marks=pytest.mark.dist)
            for bounds, parts in (([0, 7, 10], 1), ([0, 2, 3, 10], 1), ([0, 7, 10], 3), ([0, 3, 6, 10], 3))
        ],
    ],
)
def test_uneven_processes_and_parts_equal_whole_batch(bounds: list[int], parts: int) -> None:
    num = len(bounds) - 1
    steps = [_step_of_rank(bounds, parts)] if num == 1 else run_distributed(_step_of_rank, num, bounds, parts)
    expected = nn.utils.parameters_to_vector(_net().parameters()) - 0.1 * _gradient(*_batch(10), smoothing=0.1)
    for weights, *position in steps:
        torch.testing.assert_close(weights, expected)
        assert torch.equal(weights, steps[0][0])
        assert position == [1, 1]


def _gradient_of_step(steps_before: int) -> Tensor:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.Tanh())]  # several buckets
    network = distribute(nn.Sequential(*layers), this_process())
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(4, 300, generator=generator)
    for _ in range(steps_before + 1):
        network.zero_grad()
        network(images).square().sum().backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()])


def _gradients_of_first_and_later_steps() -> tuple[Tensor, Tensor]:
    return _gradient_of_step(0), _gradient_of_step(2)


@pytest.mark.dist
def test_three_processes_average_every_step_identically() -> None:
    for first, later in run_distributed(_gradients_of_first_and_later_steps, 3):
        assert torch.equal(first, later)


def _buffers_before_and_after_sharing() -> list[Tensor]:
    images, targets = _batch(10)
    model = nn.Sequential(nn.BatchNorm2d(3), _net())
    state = new_state(model=model)
    train_step(state, StepBatch(images * (1 + dist.get_rank()), targets, global_size=20))
    assert state.ema is not None
    before = copy.deepcopy(model[0].running_var)
    broadcast_buffers(state)
    return [before, model[0].running_var, state.ema[0].running_var]


@pytest.mark.dist
def test_running_statistics_are_per_rank_until_shared() -> None:
    first, second = run_distributed(_buffers_before_and_after_sharing, 2)
    assert not torch.allclose(first[0], second[0])
    for shared in (*first[1:], *second[1:]):
        assert torch.equal(shared, first[0])
