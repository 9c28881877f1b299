"""Replicas with synchronized norms run in lockstep: the same weights on any number of processes, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as collectives
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.dist.spawn import run_distributed
from tests.engine.test_exact_resume import kill_at
from tests.engine.tiny import MemoryLog, differences, make_config, make_images, this_process
from tests.engine.tiny import run as run_training
from tests.refusals import refused
from zoo.config.experiment import Experiment, check_world_size
from zoo.config.network import NetworkSpec
from zoo.config.parse import load_experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.digest import digest, state_tensors
from zoo.engine.observers import build_observers
from zoo.engine.process import Process
from zoo.engine.replicas import SynchronizedReplicas, build_replicas, fix_algorithms
from zoo.engine.state import TrainState, build_state, set_training_mode, shared_state
from zoo.engine.step import StepBatch, compute_loss, train_step
from zoo.errors import ConfigError
from zoo.layers import ABN, InPlaceABNSync
from zoo.models.build import build_on_meta
from zoo.registry.experiments import with_changes
from zoo.registry.get import build_from_config
from zoo.tasks import task_of

EPOCH = {"type": "linear", "mode": "step", "epochs": 1, "params": {"alpha": -0.1, "beta": 1.0}}


def _config(replicas: int = 4, **changes: Any) -> Experiment:
    optimizer = {"batch_size": 16, "replicas": replicas, "schedule": EPOCH, **changes.pop("optimizer", {})}
    return make_config(optimizer=optimizer, **changes)


class _Net(nn.Module):
    """A network of synchronized norms; ``norm`` makes each of them."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        return self.head((x + self.bn2(self.conv2(x * 1))).mean((2, 3)))


def _sync(width: int) -> nn.Module:
    norm = InPlaceABNSync(width)
    norm.inplace = False
    return norm


def _state(model: nn.Module, config: Experiment, process: Process | None = None) -> TrainState:
    state = build_state(task_of(config), model, process or Process())
    set_training_mode(state)
    return state


def _batches(state: TrainState, num_images: int, dtype: torch.dtype = torch.float32) -> list[StepBatch]:
    images = torch.randn(num_images, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.arange(num_images) % 2
    count = state.config.optimizer.replicas
    return [StepBatch(images[r::count].to(dtype), targets[r::count], num_images) for r in state.replicas.own]


PLAIN_SGD = {"batch_size": 16, "clip": 0, "ema_decay": None, "momentum": 0, "weight_decay": 0}


@pytest.mark.parametrize("num_images", [16, 13])
def test_step_in_double_precision_equals_whole_batch_of_torch(num_images: int) -> None:
    state = _state(_Net(_sync).double(), _config(optimizer=PLAIN_SGD))
    twin = _Net(lambda width: nn.Sequential(nn.BatchNorm2d(width, eps=1e-5), nn.LeakyReLU(0.01))).double()
    twin.train()
    batches = _batches(state, num_images, torch.float64)
    train_step(state, *batches)
    images, targets = torch.cat([b.images for b in batches]), torch.cat([b.targets for b in batches])
    F.cross_entropy(twin(images), targets).backward()
    for (name, own), other in zip(state.model.named_parameters(), twin.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        # eps is also added to |weight|, which is 1.
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    for index in (1, 2):
        own, other = getattr(state.model, f"bn{index}"), getattr(twin, f"bn{index}")[0]
        torch.testing.assert_close(own.running_var, other.running_var, rtol=1e-4, atol=1e-6)
        assert own.num_batches_tracked == 1


class _DifferentiableSync(nn.Module):
    """Synchronized batch norm with leaky ReLU by differentiable collectives of torch, as torch.nn.SyncBatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        count = x.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([count, x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        total = collectives.all_reduce(sums)
        mean, square = (total[1:] / total[0]).chunk(2)
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) * torch.rsqrt(square - mean.square() + 1e-5).view(shape)
        return F.leaky_relu(x * (self.weight.abs() + 1e-5).view(shape) + self.bias.view(shape), 0.01)


def _gradients_of_ddp(num_images: int) -> dict[str, Tensor]:
    twin = _Net(_DifferentiableSync).double()
    wrapped, world_size = DistributedDataParallel(twin), dist.get_world_size()
    images = torch.randn(num_images, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.arange(num_images) % 2
    rank = dist.get_rank()
    logits = wrapped(images[rank::world_size])
    loss = F.cross_entropy(logits, targets[rank::world_size], reduction="sum") * world_size / num_images
    loss.backward()
    return {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}


@pytest.mark.dist
def test_step_in_double_precision_equals_synchronized_norms_under_ddp() -> None:
    expected = run_distributed(_gradients_of_ddp, 4, 13)[0]
    state = _state(_Net(_sync).double(), _config(optimizer=PLAIN_SGD))
    train_step(state, *_batches(state, 13, torch.float64))
    own = {name: each.grad for name, each in state.model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_replica_0_gives_buffers_and_each_has_its_own() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 1), InPlaceABNSync(4), nn.Conv2d(4, 4, 1), ABN(4), nn.Flatten(), nn.Linear(144, 2)
    )
    state = _state(network, _config(optimizer=PLAIN_SGD))
    twin = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.01), nn.Conv2d(4, 4, 1))
    twin.load_state_dict({**twin.state_dict(), **{k: v.clone() for k, v in network[0].state_dict(prefix="0.").items()}})
    twin[3].load_state_dict(network[2].state_dict())
    batches = _batches(state, 16)
    with torch.no_grad():
        whole = twin(torch.cat([batch.images for batch in batches]))[:4]  # the first four images are of replica 0
    train_step(state, *batches)
    assert network[1].num_batches_tracked == network[3].num_batches_tracked == 1
    torch.testing.assert_close(network[3].running_mean, 0.1 * whole.mean((0, 2, 3)), rtol=1e-3, atol=1e-5)


def test_gradients_of_replicas_are_freed_and_network_keeps_no_hooks() -> None:
    state = _state(_Net(_sync), _config())
    train_step(state, *_batches(state, 16))
    assert isinstance(state.replicas, SynchronizedReplicas)
    for each in state.replicas._copies:
        assert all(parameter.grad is None for parameter in each.parameters)
        assert all(
            own.data_ptr() == p.data_ptr() for own, p in zip(each.parameters, state.model.parameters(), strict=True)
        )
    (state.model(_batches(state, 16)[0].images).sum() * 2).backward()
    assert all(parameter.grad is not None for parameter in state.model.parameters())


class _Alternating(_Net):
    """A network that uses one parameter in every other forward pass; a buffer counts the passes."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(norm)
        self.shift = nn.Parameter(torch.zeros(2))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) + (self.shift if self.passes % 2 else 0)


@pytest.mark.parametrize("norm", [_sync, ABN])
def test_gradient_of_an_earlier_micro_batch_alone_counts(norm: Callable[[int], nn.Module]) -> None:
    state = _state(_Alternating(norm), _config(optimizer={**PLAIN_SGD, "accumulate_steps": 2}))
    train_step(state, *_batches(state, 16))
    gradient = state.model.shift.grad
    assert gradient is not None
    assert gradient.abs().min() > 0


def test_function_that_refers_to_the_network_raises() -> None:
    model = _Net(_sync)
    head, model.head = model.head, nn.Identity()
    model.head.forward = lambda x: head(x)
    model.kept = head
    state = _state(model, _config())
    refused(ConfigError, lambda: train_step(state, *_batches(state, 16)), "replicas = 4", "kept.weight")


def test_hooks_of_parameters_and_groups_of_norms_raise() -> None:
    model = _Net(_sync)
    model.head.weight.register_hook(lambda gradient: gradient)
    refused(ConfigError, lambda: build_replicas(model, _config(), Process()), "replicas = 4", "head.weight")
    model = _Net(_sync)
    model.bn2.set_group("some of the processes")
    refused(ConfigError, lambda: build_replicas(model, _config(), Process()), "replicas = 4", "bn2")


class _Odd(_Net):
    """A network that runs its second norm for some images only."""

    def forward(self, x: Tensor) -> Tensor:
        mapped = self.bn1(self.conv1(x))
        return self.head((self.bn2(mapped) if len(x) == 4 else mapped).mean((2, 3)))


def test_norm_that_some_replicas_skip_raises() -> None:
    state = _state(_Odd(_sync), _config())
    refused(ConfigError, lambda: train_step(state, *_batches(state, 13)), "replicas = 4")


def test_meter_that_runs_one_replica_alone_raises() -> None:
    content = {
        "network": {"arch": "revnet38_cifar", "num_classes": 2, **SYNC},
        "optimizer": {"batch_size": 16, "replicas": 4, "schedule": EPOCH},
        "training": {"gradient_angle_meter": 5},
    }
    config = parse_experiment(content, "test")
    state = _state(build_from_config(config.network), config)
    loader: Any = SimpleNamespace(dataset=None)
    refused(
        ConfigError,
        lambda: build_observers(state, loader, None, MemoryLog()),
        "gradient_angle_meter = 5",
        "optimizer.replicas",
    )


SYNC = {"norm": "sync", "activation": "leaky_relu"}


def _digest(network: dict[str, Any], world_changes: dict[str, Any], side: int = 32, steps: int = 2) -> str:
    """Train some steps on random images, and return the digest."""
    torch.set_num_threads(1)
    process, count = this_process(), 4
    accumulate = world_changes.get("optimizer", {}).get("accumulate_steps", 1)
    size = 2 * count * accumulate
    segments = network["arch"].startswith("deeplab")
    content = {
        "network": {"num_classes": 2, **SYNC, **network},
        **({"segmentation": {}} if segments else {}),
        "input": {"crop_train": side, **({} if segments else {"scale_val": side, "crop_val": side})},
        **world_changes,
        "optimizer": {
            "batch_size": size, "replicas": count, "learning_rate": 0.05, "schedule": EPOCH,
            **world_changes.get("optimizer", {}),
        },
    }  # fmt: skip
    config = parse_experiment(content, "test")
    with fix_algorithms():
        torch.manual_seed(0)
        state = _state(build_from_config(config.network), config, process)
        assert isinstance(state.replicas, SynchronizedReplicas)
        generator = torch.Generator().manual_seed(1)
        for step in range(steps):
            num_images = size + step  # an uneven batch in the second step
            images = torch.randn(num_images, 3, side, side, generator=generator)
            shape = (num_images, side, side) if segments else (num_images,)
            targets = torch.randint(2, shape, generator=generator)
            own = state.replicas.own
            train_step(state, *(StepBatch(images[r::count], targets[r::count], num_images) for r in own))
        return digest(state_tensors(shared_state(state)))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resnet18": ({"arch": "resnet18"}, {}),
    "resnet50": ({"arch": "resnet50"}, {}),
    "revnet": ({"arch": "revnet38_cifar"}, {}),
    "densenet": ({"arch": "densenet121"}, {}),
    "deeplab": ({"arch": "deeplab_resnet18"}, {}),
    "checkpointing": ({"arch": "resnet32_cifar", "memory": "checkpoint"}, {}),
    "lean": ({"arch": "resnet32_cifar", "memory": "lean"}, {}),
    "channels last": ({"arch": "resnet32_cifar"}, {"training": {"channels_last": True}}),
    "bf16": ({"arch": "resnet32_cifar"}, {"training": {"amp": "bf16"}}),
    "fp16": ({"arch": "resnet32_cifar"}, {"training": {"amp": "fp16"}}),
    "accumulation": ({"arch": "resnet32_cifar"}, {"optimizer": {"accumulate_steps": 2}}),
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_networks_train_same_weights_on_one_and_three_processes(name: str) -> None:
    expected = _digest(*CASES[name])
    assert run_distributed(_digest, 3, *CASES[name]) == [expected] * 3


@pytest.mark.dist
def test_small_network_trains_same_weights_on_one_to_four_processes() -> None:
    expected = _digest({"arch": "resnet32_cifar"}, {}, 8)
    for world_size in (2, 4):
        assert run_distributed(_digest, world_size, {"arch": "resnet32_cifar"}, {}, 8) == [expected] * world_size


def build_sync_net(network: NetworkSpec) -> nn.Module:
    """Return a small network with synchronized norms, a plain norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), InPlaceABNSync(8), nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, stride=2, bias=False), ABN(16), nn.Conv2d(16, 8, 1), InPlaceABNSync(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, network.num_classes),
    )  # fmt: skip


def _train(config: Experiment, data: Path, folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    """Train, and return everything that is reported."""
    log = MemoryLog()
    run_training(config, data, folder, log, **options)
    validations = [(epoch, step, result.record(), is_best) for epoch, step, result, is_best in log.validations]
    return log.numbers, log.digests, validations


@pytest.mark.slow
@pytest.mark.dist
def test_run_killed_twice_resumes_on_other_numbers_of_processes(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", 44, num_val=11)
    schedule = {"type": "linear", "mode": "step", "epochs": 3, "params": {"alpha": -0.1, "beta": 1.0}}
    config = _config(checkpoint={"every_steps": 2}, optimizer={"schedule": schedule})
    options = {"build": build_sync_net}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _, digests, validations = _train(config, data, straight, options)
    kill_at(3, 3, config, data, killed, build=build_sync_net)
    assert read(killed / CHECKPOINT)["position"]["step"] == 2
    kill_at(7, 2, config, data, killed, build=build_sync_net, resume="auto")
    resumed = _train(config, data, killed, {**options, "resume": "auto"})
    assert (resumed[1], resumed[2]) == (digests[2:], validations[2:])
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []


PUBLISHED = [*Path("experiments").glob("*_ip*abn*.json"), *Path("experiments").glob("*_stdbn*.json")]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(PUBLISHED), ids=lambda path: path.stem)
def test_published_experiment_runs_its_replicas_on_one_process(path: Path) -> None:
    config = load_experiment(path)
    count = config.expected.gpus if config.expected is not None and config.expected.gpus is not None else 8
    config = with_changes(config, replicas=count)
    check_world_size(config, 1)
    model = build_on_meta(config.network)
    is_sync = any(isinstance(module, InPlaceABNSync) for module in model.modules())
    state = _state(model, config, Process(device=torch.device("meta")))
    assert isinstance(state.replicas, SynchronizedReplicas) == is_sync
    side = 64
    images = torch.empty(2, 3, side, side, device="meta")
    targets = torch.zeros(2, *(side, side) if config.segmentation is not None else (), dtype=torch.int64, device="meta")
    calls = []

    def backward(index: int, network: nn.Module) -> None:
        calls.append(state.replicas.own[index])
        with state.replicas.reducing(network, 0, is_last=True):
            _, loss = compute_loss(state, network, images, targets)
            loss.backward()

    state.replicas.run(backward, 0, [images.shape] * count, state.scaler)
    assert calls == [*reversed(range(count))]
    assert all(parameter.grad is None for parameter in model.parameters())
