"""Replicas train bit-identical weights on any number of processes, equal to training on as many GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.data.sample_labels import make_labeled
from tests.dist.spawn import run_distributed
from tests.engine.test_exact_resume import kill_at
from tests.engine.tiny import (
    MemoryLog,
    build_net,
    differences,
    make_config,
    make_images,
    make_segmentation_config,
    run,
    this_process,
)
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.config.parse import parse_experiment
from zoo.data.dataset import collate
from zoo.data.loader import build_train_loader
from zoo.data.seeding import mixed_seed
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import Process
from zoo.engine.replicas import ExactReplicas, build_replicas, fix_algorithms
from zoo.engine.state import TrainState, build_state
from zoo.engine.step import StepBatch, train_step
from zoo.errors import ConfigError, NonFiniteLossError
from zoo.layers import ABN, InPlaceABNSync
from zoo.registry.get import build_from_config
from zoo.tasks import task_of

NUM_IMAGES = 44  # two batches of 16, and one of 12
EPOCH = {"type": "linear", "mode": "step", "epochs": 1, "params": {"alpha": -0.1, "beta": 1.0}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), NUM_IMAGES, num_val=11)


def _config(replicas: int | None = 4, **changes: Any) -> Experiment:
    optimizer = {"batch_size": 16, "replicas": replicas, "schedule": EPOCH, **changes.pop("optimizer", {})}
    return make_config(optimizer=optimizer, **changes)


def _network(arch: str, **changes: Any) -> Experiment:
    """Return the settings of a run that trains a network of 32 px images by name."""
    network = {"arch": arch, **changes.pop("network", {})}
    sizes = {"crop_train": 32, "scale_val": 32, "crop_val": 32}
    config = _config(input=sizes, **changes)
    content = {**config.model_dump(mode="json"), "network": {"num_classes": 2, **network}}
    return parse_experiment(content, "test")


def _train(config: Experiment, data: Path, folder: Path, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """Train; return all reports: losses and scores, digests, results of validations."""
    log = MemoryLog()
    run(config, data, folder, log, **(options or {}))
    validations = [(epoch, step, result.record(), is_best) for epoch, step, result, is_best in log.validations]
    return log.numbers, log.digests, validations


def _check_same(worlds: tuple[int, ...], config: Experiment, data: Path, folder: Path, options: dict[str, Any]) -> None:
    """Assert that reports and checkpoints are equal on any number of processes."""
    expected = _train(config, data, folder / "1", options)
    assert len(expected[1]) == config.optimizer.schedule.epochs
    for world in worlds:
        for reported in run_distributed(_train, world, config, data, folder / str(world), options):
            assert reported == expected
        assert differences(read(folder / "1" / CHECKPOINT), read(folder / str(world) / CHECKPOINT)) == []


@pytest.mark.slow
@pytest.mark.dist
def test_any_number_of_processes_trains_same_weights(data: Path, tmp_path: Path) -> None:
    _check_same((2, 3, 4), _config(), data, tmp_path, {})


@pytest.mark.slow
@pytest.mark.dist
def test_processes_that_do_not_divide_eight_replicas_train_same_weights(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", 2 * 32 + 17, num_val=11)
    _check_same((3, 8), _config(8, optimizer={"batch_size": 32}), data, tmp_path, {})


INPLACE = {"norm": "inplace", "activation": "leaky_relu"}
SETTINGS: dict[str, Callable[[], Experiment]] = {
    "bf16": lambda: _config(training={"amp": "bf16"}),
    "fp16": lambda: _config(training={"amp": "fp16"}),
    "mixed images": lambda: _config(regularization={"mixup": 0.8, "cutmix": 1.0}),
    "accumulation": lambda: _config(optimizer={"accumulate_steps": 2}),
    "AdamW, no clipping, repeats": lambda: _config(optimizer={"type": "AdamW", "clip": 0}, input={"repeats_train": 3}),
    "channels last": lambda: _config(training={"channels_last": True}),
}
NETWORKS: dict[str, Callable[[], Experiment]] = {
    "in-place norms": lambda: _network("resnet32_cifar", network=INPLACE),
    "checkpointing": lambda: _network("resnet32_cifar", network={**INPLACE, "memory": "checkpoint"}),
    "reversible": lambda: _network("revnet38_cifar"),
    "lean torchvision": lambda: _network("torchvision:resnet18", network={"memory": "lean"}),
    "timm": lambda: _network("timm:mobilenetv3_small_050", network={"options": {"drop_path_rate": 0.2}}),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_train_same_weights_on_three_processes(name: str, data: Path, tmp_path: Path) -> None:
    _check_same((3,), SETTINGS[name](), data, tmp_path, {})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_same_weights_on_three_processes(name: str, data: Path, tmp_path: Path) -> None:
    if name == "timm":
        pytest.importorskip("timm")
    _check_same((3,), NETWORKS[name](), data, tmp_path, {"build": build_from_config})


def build_segmenter(network: NetworkSpec) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), ABN(8), nn.Conv2d(8, network.num_classes, 1))


@pytest.mark.dist
def test_segmentation_trains_same_weights_on_three_processes(tmp_path: Path) -> None:
    data = make_labeled(tmp_path / "data", num_train=14, num_val=5)
    config = make_segmentation_config(optimizer={"replicas": 4, "batch_size": 8})
    _check_same((3,), config, data, tmp_path, {"build": build_segmenter})


@pytest.mark.dist
def test_run_killed_on_three_processes_resumes_on_two(data: Path, tmp_path: Path) -> None:
    schedule = {"type": "linear", "mode": "step", "epochs": 3, "params": {"alpha": -0.1, "beta": 1.0}}
    config = _config(checkpoint={"every_steps": 2}, optimizer={"schedule": schedule})
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    numbers, digests, validations = _train(config, data, straight)
    kill_at(5, 3, config, data, killed)
    assert read(killed / CHECKPOINT)["position"]["step"] == 4
    for resumed in run_distributed(_train, 2, config, data, killed, {"resume": "auto"}):
        assert resumed == (numbers[4:], digests[1:], validations[1:])
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []


def _expected_weights(config: Experiment, data: Path) -> dict[str, Tensor]:
    """Return the weights of one epoch of replicas, one after the other, by torch alone."""
    replicas, size = 4, config.optimizer.batch_size
    torch.manual_seed(random.Random("zoo 0 -1").getrandbits(63))
    model = build_net(config.network)
    settings = config.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
    )
    dataset = build_train_loader(data, config).dataset
    order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(mixed_seed(0, 0))).tolist()
    for step in range(3):
        chosen = order[step * size :][:size]
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        sums: dict[str, Any] = {name: 0 for name, _ in model.named_parameters()}
        after = {}
        for replica in range(replicas):
            batch: Any = collate([dataset[0, index] for index in chosen[replica::replicas]])
            torch.manual_seed(random.Random(f"zoo 0 {step} {replica}").getrandbits(63))
            loss = F.cross_entropy(model(batch.on(torch.device("cpu"))), batch.targets, reduction="sum")
            gradients = torch.autograd.grad(loss / len(chosen), list(model.parameters()))
            for name, gradient in zip(sums, gradients, strict=True):
                sums[name] = sums[name] + np.rint(gradient.double().numpy() * 2.0**40).astype(np.int64)
            for name, buffer in model.named_buffers():
                if replica == 0:
                    after[name] = buffer.clone()
                buffer.copy_(before[name])
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(sums[name].astype(np.float32)) * 2.0**-40
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * settings.schedule.factor(0, step, 3, 0.05)
        optimizer.step()
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
    return model.state_dict()


def test_epoch_equals_loop_of_plain_torch_with_sums_of_integers(data: Path, tmp_path: Path) -> None:
    config = _config()
    state = run(config, data, tmp_path, MemoryLog())
    assert differences(state.model.state_dict(), _expected_weights(config, data)) == []


def build_without_dropout(network: NetworkSpec) -> nn.Module:
    return nn.Sequential(*[layer for layer in build_net(network) if not isinstance(layer, nn.Dropout)])


def _weights(config: Experiment, data: Path, folder: Path) -> dict[str, Tensor]:
    return run(config, data, folder, MemoryLog(), build=build_without_dropout).model.state_dict()


@pytest.mark.dist
def test_replicas_train_function_of_as_many_processes(data: Path, tmp_path: Path) -> None:
    """DistributedDataParallel has the same weights and running statistics, with norms that are not synchronized."""
    plain = run_distributed(_weights, 4, _config(None), data, tmp_path / "plain")[0]
    torch.testing.assert_close(_weights(_config(4), data, tmp_path / "replicas"), plain, rtol=1e-4, atol=1e-6)
    other = _weights(_config(2), data, tmp_path / "other")
    assert not torch.allclose(other["1.running_var"], plain["1.running_var"], rtol=1e-3)


class _Odd(nn.Module):
    """A network with a frozen, an unused and a tied parameter, and a factor for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm, self.last = nn.BatchNorm1d(12), nn.Linear(12, 2)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.flatten(1))) * self.frozen
        return self.last(self.norm(x)) * self.factor


def _odd_state(**changes: Any) -> TrainState:
    config = _config(3, optimizer={"batch_size": 12, "clip": 0, "ema_decay": None, "momentum": 0}, **changes)
    return build_state(task_of(config), _Odd(), Process())


def _odd_batches(num_images: int = 12) -> list[StepBatch]:
    images = torch.randn(num_images, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(num_images) % 2
    return [StepBatch(images[replica::3], targets[replica::3], num_images) for replica in range(3)]


def test_frozen_unused_and_tied_parameters_have_gradients_of_autograd() -> None:
    state, batches = _odd_state(), _odd_batches()
    model, twin = state.model, _Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        (F.cross_entropy(twin(batch.images), batch.targets, reduction="sum") / 12).backward()
    train_step(state, *batches)
    for (name, parameter), own in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (own.grad is None) == (name in ("frozen", "unused")), name
        if own.grad is not None:
            torch.testing.assert_close(parameter.grad, own.grad)
    assert torch.equal(model.unused, before["unused"])
    assert model.norm.num_batches_tracked == 1


def test_gradient_of_one_replica_that_is_not_finite_reaches_weights() -> None:
    state, batches = _odd_state(), _odd_batches()
    batches[1].images[0] = torch.inf
    train_step(state, *batches)
    assert state.model.last.weight.isnan().all()
    assert state.meter.read().first_bad_step == 1


def test_overflow_of_one_replica_in_half_precision_skips_step() -> None:
    state, batches = _odd_state(training={"amp": "fp16"}), _odd_batches()
    before = state.model.state_dict()["last.weight"].clone()
    batches[1].images[0] = 1e30
    scale = state.scaler.get_scale()
    train_step(state, *batches)
    assert torch.equal(state.model.last.weight, before)
    assert state.scaler.get_scale() == scale / 2
    train_step(state, *_odd_batches())
    assert not torch.equal(state.model.last.weight, before)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_loss_scale_changes_no_gradient(amp: str) -> None:
    gradients = []
    for scale in (1.0, 1024.0):
        state = _odd_state(training={"amp": amp})
        state.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=amp == "fp16")
        sums, batches = ExactReplicas(state.model, state.config, state.process), _odd_batches()

        def backward(index: int, network: nn.Module, state: TrainState = state, sums: ExactReplicas = sums) -> None:
            batch = _odd_batches()[index]
            with sums.reducing(network, 0, is_last=True):
                loss = F.cross_entropy(network(batch.images), batch.targets)
                state.scaler.scale(loss).backward()

        sums.run(backward, 0, [batch.images.shape for batch in batches], state.scaler)
        sums.set_gradients(state.scaler)
        state.scaler.unscale_(state.optimizer)
        gradients.append(state.model.first.weight.grad)
    assert torch.equal(*gradients)


def test_gradient_beyond_range_raises_with_name_of_parameter() -> None:
    state = _odd_state()
    state.model.factor = 1e9
    refused(OverflowError, lambda: train_step(state, *_odd_batches()), "first.weight", "4,194,304")


class _Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * 8 * 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1)) * 1e9


def build_steep(network: NetworkSpec) -> nn.Module:
    return _Steep()


def test_gradient_beyond_range_stops_run_with_last_good_checkpoint(data: Path, tmp_path: Path) -> None:
    train = partial(run, _config(), data, tmp_path, MemoryLog(), build=build_steep)
    refused(NonFiniteLossError, train, "gradient of last.", "step 1;", "no checkpoint")


def test_norms_of_other_packages_and_compiled_ones_need_one_replica_per_process() -> None:
    for norm, settings in ((nn.SyncBatchNorm(3), {}), (InPlaceABNSync(3), {"training": {"compile": True}})):
        network = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
        build = partial(build_replicas, network, _config(4, **settings), Process())
        refused(ConfigError, build, "replicas = 4", "norm 1 ", "1 process", "4 processes")
        assert len(build_replicas(network, _config(1, **settings), Process()).own) == 1


def _shard() -> str:
    network = nn.Linear(4, 4)
    fully_shard(network)
    try:
        ExactReplicas(network, _config(), this_process())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_sharded_parameters_raise() -> None:
    for message in run_distributed(_shard, 2):
        assert message == "optimizer.replicas = 4: the parameters are sharded (FSDP2), and replicas need whole ones"


def _broadcast_weights() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    network[1].running_mean.fill_(dist.get_rank())
    network[1].register_buffer("odd", torch.tensor([dist.get_rank() == 0] * 3))
    ExactReplicas(network, _config(), this_process())
    return network.state_dict()


@pytest.mark.dist
def test_all_ranks_start_with_weights_of_rank_0() -> None:
    first, second = run_distributed(_broadcast_weights, 2)
    assert differences(first, second) == []
    assert (first["1.running_mean"].sum(), first["1.odd"].all()) == (0, True)


def test_fixed_algorithms_end_with_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with fix_algorithms():
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, True)
        assert not torch.backends.cudnn.benchmark
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, False)
    torch.set_num_threads(before)
