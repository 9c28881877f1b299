"""Replicas train bit-identical weights on any number of processes, equal to training on as many GPUs.

Replicas with synchronized norms run in lockstep.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as collectives
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.data.sample_labels import make_labeled
from tests.dist.spawn import run_distributed
from tests.engine.test_exact_resume import kill_at
from tests.engine.tiny import (
    EPOCH,
    MemoryLog,
    build_net,
    differences,
    make_config,
    make_segmentation_config,
    new_state,
    run,
    this_process,
)
from tests.refusals import refused
from zoo.config.experiment import Experiment, check_world_size
from zoo.config.network import NetworkSpec
from zoo.config.parse import load_experiment, parse_experiment
from zoo.data.dataset import collate
from zoo.data.loader import build_train_loader
from zoo.data.seeding import mixed_seed
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.engine._process import Process
from zoo.engine._replicas import ExactReplicas, SynchronizedReplicas, fix_algorithms
from zoo.engine._state import TrainState, build_state, set_training_mode
from zoo.engine._step import StepBatch, compute_loss, train_step
from zoo.errors import NonFiniteLossError
from zoo.layers import ABN, InPlaceABNSync
from zoo.models.build import build_on_meta
from zoo.registry.experiments import with_changes
from zoo.registry.get import build_from_config
from zoo.tasks import task_of

Build = Callable[[Any], nn.Module]


def replicas_config(replicas: int | None = 4, **changes: Any) -> Experiment:
    """Return settings of an epoch of 16 images per step."""
    optimizer = {"batch_size": 16, "replicas": replicas, "schedule": EPOCH, **changes.pop("optimizer", {})}
    return make_config(optimizer=optimizer, **changes)


def _network(arch: str, options: dict[str, Any]) -> Experiment:
    """Return the settings of a run that trains a network of 32 px images by name."""
    config = replicas_config(input={"crop_train": 32, "scale_val": 32, "crop_val": 32})
    network = {"arch": arch, "num_classes": 2, **options}
    return parse_experiment({**config.model_dump(mode="json"), "network": network}, "test")


def build_segmenter(network: NetworkSpec) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), ABN(8), nn.Conv2d(8, network.num_classes, 1))


def build_sync_net(network: NetworkSpec) -> nn.Module:
    """Return a small network with synchronized norms, a plain norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), InPlaceABNSync(8), nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, stride=2, bias=False), ABN(16), nn.Conv2d(16, 8, 1), InPlaceABNSync(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, network.num_classes),
    )  # fmt: skip


class Case(NamedTuple):
    """Settings, network and numbers of processes of a run."""

    config: Experiment
    build: Build = build_net
    worlds: tuple[int, ...] = (3,)


INPLACE = {"norm": "inplace", "activation": "leaky_relu"}
SYNC = {"norm": "sync", "activation": "leaky_relu"}
ADAMW = {"type": "AdamW", "clip": 0}
SEGMENTATION = make_segmentation_config(optimizer={"replicas": 4, "batch_size": 8})
CASES: dict[str, Case] = {
    "plain": Case(replicas_config(), worlds=(2, 3, 4)),
    "eight replicas": Case(replicas_config(8, optimizer={"batch_size": 32}), worlds=(3, 8)),
    "mixed images": Case(replicas_config(regularization={"mixup": 0.8, "cutmix": 1.0})),
    "AdamW and repeats": Case(replicas_config(optimizer=ADAMW, input={"repeats_train": 3})),
    "frozen": Case(replicas_config(optimizer={"freeze": ["0", "1"]}), worlds=(2,)),
    "segmentation": Case(SEGMENTATION, build_segmenter),
    "sync": Case(replicas_config(), build_sync_net, (2, 3, 4)),
    "sync deeplab": Case(SEGMENTATION, build_from_config),
    **{
        f"{'sync ' * (build is build_sync_net)}{name}": Case(replicas_config(**changes), build)
        for build in (build_net, build_sync_net)
        for name, changes in {
            "bf16": {"training": {"amp": "bf16"}},
            "fp16": {"training": {"amp": "fp16"}},
            "accumulation": {"optimizer": {"accumulate_steps": 2}},
            "channels last": {"training": {"channels_last": True}},
        }.items()
    },
    **{
        " ".join(map(str, (arch, *network.values()))): Case(_network(arch, network), build_from_config)
        for arch, network in (
            ("resnet32_cifar", INPLACE),
            ("resnet32_cifar", {**INPLACE, "memory": "checkpoint"}),
            ("revnet38_cifar", {}),
            ("torchvision:resnet18", {"memory": "lean"}),
            ("timm:mobilenetv3_small_050", {"options": {"drop_path_rate": 0.2}}),
            ("resnet18", SYNC),
            ("resnet50", SYNC),
            ("revnet38_cifar", SYNC),
            ("densenet121", SYNC),
            ("resnet32_cifar", {**SYNC, "memory": "checkpoint"}),
            ("resnet32_cifar", {**SYNC, "memory": "lean"}),
        )
    },
}


def _reports(case: Case, data: Path, folder: Path, resume: str | None = None) -> tuple[list[Any], ...]:
    run(case.config, data, folder, log := MemoryLog(), build=case.build, resume=resume)
    return log.reports


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_number_of_processes_has_bits_of_one(case: Case, uneven_data: Path, tmp_path: Path) -> None:
    if case.config.network.arch.startswith("timm:"):
        pytest.importorskip("timm")
    is_labeled = case.config.segmentation is not None
    data = make_labeled(tmp_path / "data", num_train=14, num_val=5) if is_labeled else uneven_data
    expected = _reports(case, data, tmp_path / "1")
    assert len(expected[1]) == case.config.optimizer.schedule.epochs
    for world in case.worlds:
        for reports in run_distributed(_reports, world, case, data, tmp_path / str(world)):
            assert reports == expected
        assert differences(read(tmp_path / "1" / CHECKPOINT), read(tmp_path / str(world) / CHECKPOINT)) == []


@pytest.mark.dist
@pytest.mark.parametrize("build", [build_net, build_sync_net])
def test_killed_run_resumes_on_other_numbers_of_processes(build: Build, uneven_data: Path, tmp_path: Path) -> None:
    config = replicas_config(checkpoint={"every_steps": 2}, optimizer={"schedule": EPOCH | {"epochs": 3}})
    case, straight, killed = Case(config, build), tmp_path / "straight", tmp_path / "killed"
    numbers, digests, validations = _reports(case, uneven_data, straight)
    kill_at(3, 3, config, uneven_data, killed, build=build)
    assert read(killed / CHECKPOINT)["position"]["step"] == 2
    kill_at(7, 2, config, uneven_data, killed, build=build, resume="auto")
    resumed = _reports(case, uneven_data, killed, "auto")
    assert resumed == (numbers[6:], digests[2:], validations[2:])
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
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(mixed_seed(0, 0))).tolist()
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


def test_epoch_equals_loop_of_plain_torch_with_sums_of_integers(uneven_data: Path, tmp_path: Path) -> None:
    config = replicas_config()
    state = run(config, uneven_data, tmp_path, MemoryLog())
    assert differences(state.model.state_dict(), _expected_weights(config, uneven_data)) == []


def build_without_dropout(network: NetworkSpec) -> nn.Module:
    return nn.Sequential(*[layer for layer in build_net(network) if not isinstance(layer, nn.Dropout)])


def _weights(config: Experiment, data: Path, folder: Path) -> dict[str, Tensor]:
    return run(config, data, folder, MemoryLog(), build=build_without_dropout).model.state_dict()


@pytest.mark.dist
def test_replicas_train_like_as_many_processes(uneven_data: Path, tmp_path: Path) -> None:
    """DistributedDataParallel has the same weights and running statistics, with norms that are not synchronized."""
    plain = run_distributed(_weights, 4, replicas_config(None), uneven_data, tmp_path / "plain")[0]
    own = _weights(replicas_config(4), uneven_data, tmp_path / "replicas")
    torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)
    other = _weights(replicas_config(2), uneven_data, tmp_path / "other")
    assert not torch.allclose(other["1.running_var"], plain["1.running_var"], rtol=1e-3)


PLAIN_SGD = {"clip": 0, "ema_decay": None, "momentum": 0, "weight_decay": 0}


def training_state(model: nn.Module, replicas: int = 4, **changes: Any) -> TrainState:
    """Return the state of a run of SGD in training mode."""
    optimizer = {**PLAIN_SGD, "batch_size": 4 * replicas, **changes.pop("optimizer", {})}
    state = new_state(replicas_config(replicas, optimizer=optimizer, **changes), model)
    set_training_mode(state)
    return state


def batches_of(
    state: TrainState, num_images: int, dtype: torch.dtype = torch.float32, side: int = 6
) -> list[StepBatch]:
    """Return random images for each replica."""
    images = torch.randn(num_images, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.arange(num_images) % 2
    count = state.config.optimizer.replicas
    return [StepBatch(images[r::count].to(dtype), targets[r::count], num_images) for r in state.replicas.own]


class Odd(nn.Module):
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


def _odd(**changes: Any) -> tuple[TrainState, list[StepBatch]]:
    """Return the state of a run of three replicas, and a batch for each of them."""
    state = training_state(Odd(), 3, **changes)
    return state, batches_of(state, 12, side=2)


def test_frozen_unused_and_tied_parameters_have_gradients_of_autograd() -> None:
    state, batches = _odd()
    model, twin = state.model, Odd()
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
    state, batches = _odd()
    batches[1].images[0] = torch.inf
    train_step(state, *batches)
    assert state.model.last.weight.isnan().all()
    assert state.meter.read().first_bad_step == 1


def test_overflow_of_one_replica_in_half_precision_skips_step() -> None:
    state, batches = _odd(training={"amp": "fp16"})
    before = state.model.state_dict()["last.weight"].clone()
    batches[1].images[0] = 1e30
    scale = state.scaler.get_scale()
    train_step(state, *batches)
    assert torch.equal(state.model.last.weight, before)
    assert state.scaler.get_scale() == scale / 2
    train_step(state, *batches_of(state, 12, side=2))
    assert not torch.equal(state.model.last.weight, before)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_loss_scale_changes_no_gradient(amp: str) -> None:
    gradients = []
    for scale in (1.0, 1024.0):
        state, batches = _odd(training={"amp": amp})
        state.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=amp == "fp16")
        train_step(state, *batches)
        gradients.append(state.model.first.weight.grad)
    assert torch.equal(*gradients)


def test_gradient_beyond_range_raises_with_name_of_parameter() -> None:
    state, batches = _odd()
    state.model.factor = 1e9
    refused(OverflowError, lambda: train_step(state, *batches), "first.weight", "4,194,304")


def build_steep(network: NetworkSpec) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    model.register_forward_hook(lambda module, inputs, output: output * 1e9)
    return model


def test_gradient_beyond_range_stops_run_with_last_good_checkpoint(uneven_data: Path, tmp_path: Path) -> None:
    def train() -> None:
        run(replicas_config(), uneven_data, tmp_path, MemoryLog(), build=build_steep)

    refused(NonFiniteLossError, train, "gradient of 1.", "step 1;", "no checkpoint")


class Net(nn.Module):
    """A network of two norms that ``norm`` makes."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        return self.head((x + self.bn2(self.conv2(x * 1))).mean((2, 3)))


def sync(width: int) -> nn.Module:
    """Return a synchronized norm that does not overwrite its input."""
    norm = InPlaceABNSync(width)
    norm.inplace = False
    return norm


@pytest.mark.parametrize("num_images", [16, 13])
def test_step_in_double_precision_equals_whole_batch_of_torch(num_images: int) -> None:
    state = training_state(Net(sync).double())
    twin = Net(lambda width: nn.Sequential(nn.BatchNorm2d(width, eps=1e-5), nn.LeakyReLU(0.01))).double()
    twin.train()
    batches = batches_of(state, num_images, torch.float64)
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


def _gradients_of_ddp(images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    twin = Net(_DifferentiableSync).double()
    wrapped, world_size, rank = DistributedDataParallel(twin), dist.get_world_size(), dist.get_rank()
    loss = F.cross_entropy(wrapped(images[rank::world_size]), targets[rank::world_size], reduction="sum")
    (loss * world_size / len(images)).backward()
    return {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}


@pytest.mark.dist
def test_step_in_double_precision_equals_synchronized_norms_under_ddp() -> None:
    state = training_state(Net(sync).double())
    batches = batches_of(state, 13, torch.float64)
    images, targets = torch.empty(13, 3, 6, 6, dtype=torch.float64), torch.arange(13) % 2
    for replica, batch in enumerate(batches):
        images[replica::4] = batch.images
    expected = run_distributed(_gradients_of_ddp, 4, images, targets)[0]
    train_step(state, *batches)
    own = {name: each.grad for name, each in state.model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_network_keeps_buffers_of_replica_0() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 1), InPlaceABNSync(4), nn.Conv2d(4, 4, 1), ABN(4), nn.Flatten(), nn.Linear(144, 2)
    )
    state = training_state(network)
    twin = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.01), nn.Conv2d(4, 4, 1))
    twin.load_state_dict({**twin.state_dict(), **{k: v.clone() for k, v in network[0].state_dict(prefix="0.").items()}})
    twin[3].load_state_dict(network[2].state_dict())
    batches = batches_of(state, 16)
    with torch.no_grad():
        whole = twin(torch.cat([batch.images for batch in batches]))[:4]  # the first four images are of replica 0
    train_step(state, *batches)
    assert network[1].num_batches_tracked == network[3].num_batches_tracked == 1
    torch.testing.assert_close(network[3].running_mean, 0.1 * whole.mean((0, 2, 3)), rtol=1e-3, atol=1e-5)


def test_gradients_of_replicas_are_freed_and_network_keeps_no_hooks() -> None:
    state = training_state(Net(sync))
    train_step(state, *batches_of(state, 16))
    assert isinstance(state.replicas, SynchronizedReplicas)
    for each in state.replicas._copies:
        assert all(parameter.grad is None for parameter in each.parameters)
        assert all(
            own.data_ptr() == p.data_ptr() for own, p in zip(each.parameters, state.model.parameters(), strict=True)
        )
    (state.model(batches_of(state, 16)[0].images).sum() * 2).backward()
    assert all(parameter.grad is not None for parameter in state.model.parameters())


class _Alternating(Net):
    """A network that uses one parameter in every other forward pass; a buffer counts the passes."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(norm)
        self.shift = nn.Parameter(torch.zeros(2))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) + (self.shift if self.passes % 2 else 0)


@pytest.mark.parametrize("norm", [sync, ABN])
def test_gradient_of_an_earlier_micro_batch_alone_counts(norm: Callable[[int], nn.Module]) -> None:
    state = training_state(_Alternating(norm), optimizer={"accumulate_steps": 2})
    train_step(state, *batches_of(state, 16))
    gradient = state.model.shift.grad
    assert gradient is not None
    assert gradient.abs().min() > 0


def _broadcast_weights() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    network[1].running_mean.fill_(dist.get_rank())
    network[1].register_buffer("odd", torch.tensor([dist.get_rank() == 0] * 3))
    ExactReplicas(network, replicas_config(), this_process())
    return network.state_dict()


@pytest.mark.dist
def test_all_ranks_start_with_weights_of_rank_0() -> None:
    first, second = run_distributed(_broadcast_weights, 2)
    assert differences(first, second) == []
    assert (first["1.running_mean"].sum(), first["1.odd"].all()) == (0, True)


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
    state = build_state(task_of(config), model, Process(device=torch.device("meta")))
    set_training_mode(state)
    assert isinstance(state.replicas, SynchronizedReplicas) == is_sync
    side = 64
    images = torch.empty(2, 3, side, side, device="meta")
    targets = torch.zeros(2, *(side, side) if config.segmentation is not None else (), dtype=torch.int64, device="meta")
    calls = []

    def backward(index: int, network: nn.Module) -> None:
        calls.append(state.replicas.own[index])
        with state.replicas.reduce_gradients(network, 0, is_last=True):
            _, loss = compute_loss(state, network, images, targets)
            loss.backward()

    state.replicas.run(backward, 0, [images.shape] * count, state.scaler)
    assert calls == [*reversed(range(count))]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fixed_algorithms_end_with_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with fix_algorithms():
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, True)
        assert not torch.backends.cudnn.benchmark
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, False)
    torch.set_num_threads(before)
