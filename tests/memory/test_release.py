"""Training with released gradients is bit-identical to torch's optimizers; unsupported uses are refused."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import zoo
from tests.refusals import refused
from zoo.errors import ConfigError
from zoo.memory.allocations import count_memory
from zoo.memory.release import PER_PARAMETER, ReleasedGradient, release_of
from zoo.memory.values import bits


@pytest.fixture(autouse=True)
def _keep_none(monkeypatch, request):
    """Let gradients of all sizes be released."""
    if "small" not in request.node.name:
        monkeypatch.setattr("zoo.memory.release.KEPT_SHARE", 0.0)


class Net(nn.Module):
    """A convolutional network with a weight that two layers share, and a branch that only some steps use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.to(dtype)

    def forward(self, x: torch.Tensor, with_branch: bool = True) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        x = self.second(self.first(x).relu()) + x
        return self.last(x + self.branch(x) if with_branch else x)


class Linears(nn.Module):
    """Matrices only, as Muon requires; two of them are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, with_branch: bool = True) -> torch.Tensor:
        x = self.first(x.mean((2, 3)).repeat(1, 3)[:, :8]).relu()
        return self.last(self.second(x).relu() + x if with_branch else x)


#: Options from which a configuration draws, by the optimizer.
OPTIONS = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.1}, {},
            {"maximize": True}, {"foreach": True, "momentum": 0.9}, {"fused": True, "momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"betas": (0.5, 0.9)}, {"foreach": True}, {"fused": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"foreach": True}],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}, {"fused": True}],
    "NAdam": [{}, {"momentum_decay": 0.01}],
    "RAdam": [{}, {"decoupled_weight_decay": True}],
    "Adamax": [{}],
    "Adadelta": [{}, {"foreach": True}],
    "Adafactor": [{}, {"d": 2.0}],
    "ASGD": [{}, {"t0": 5.0}],
    "Rprop": [{}],
    "Muon": [{}, {"nesterov": False}],
}  # fmt: skip
WITHOUT_DECAY = ("Rprop",)
CASES = [
    (name, options | ({} if name in WITHOUT_DECAY or seed % 3 else {"weight_decay": 0.1}), seed)
    for seed, (name, options) in enumerate((name, each) for name, several in OPTIONS.items() for each in several)
] + [(name, OPTIONS[name][0], 40 + seed) for seed, name in enumerate(("SGD", "Adam", "AdamW", "RMSprop", "Muon"))]


@pytest.mark.parametrize(
    ("name", "options", "seed"), CASES, ids=[f"{name}-{seed}-{'-'.join(options)}" for name, options, seed in CASES]
)
def test_20_steps_are_bit_identical_to_torch(name, options, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    steps_of_accumulation, by_context = draw.choice((1, 1, 2, 3)), draw.random() < 0.3
    dtype = torch.bfloat16 if draw.random() < 0.2 and "fused" not in options else torch.float32
    clip_value = draw.choice((None, None, 0.01))
    network = Linears() if name == "Muon" else Net(dtype)
    for each in draw.sample([*network.parameters()][:-1], k=draw.choice((0, 0, 1, 2)) % len([*network.parameters()])):
        each.requires_grad_(False)
    is_lean, seen = draw.random() < 0.5, []
    for is_released in (False, True):
        model = copy.deepcopy(network)
        optimizer = _optimizer(model, name, options)
        scheduler = StepLR(optimizer, 5, 0.5)
        average = AveragedModel(model)
        release = None
        if is_released:
            model = zoo.lean(model) if is_lean else model
            steps = 1 if by_context else steps_of_accumulation
            release = zoo.release_gradients(model, optimizer, accumulate_steps=steps, clip_value=clip_value)
        inputs = torch.Generator().manual_seed(seed)
        for step in range(20):
            with_branch = step % 4 > 0 or "fused" in options  # torch's fused SGD needs all gradients in the first step
            for number in range(steps_of_accumulation):
                is_last = number == steps_of_accumulation - 1
                keep = nullcontext() if release is None or is_last or not by_context else release.accumulate()
                images = torch.randn(4, 3, 5, 5, generator=inputs).to(next(model.parameters()).dtype)
                with keep:
                    model(images, with_branch=with_branch).square().mean().backward()
            if release is None and clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            if is_released and with_branch:
                assert all(isinstance(each.grad, ReleasedGradient) for each in model.parameters() if each.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
            if step == 10:  # like a resumed run
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        seen.append([*model.state_dict().values(), *average.state_dict().values(), *_states(optimizer)])
    assert len(seen[0]) > len(network.state_dict())
    _assert_same(*seen)


def _optimizer(model: nn.Module, name: str, options: dict) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    if name == "Muon":
        groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
    return getattr(torch.optim, name)(groups, lr=0.01, **options)


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = optimizer.state_dict()["state"]
    return [torch.as_tensor(value) for _, state in sorted(found.items()) for _, value in sorted(state.items())
            if value is not None]  # fmt: skip


def _assert_same(values, others):
    assert len(values) == len(others) > 0
    for a, b in zip(values, others, strict=True):
        assert torch.equal(bits(a.detach().contiguous()), bits(b.detach().contiguous()))


def _both(train):
    """Return the results of a training function without and with released gradients."""
    results = []
    for is_released in (False, True):
        torch.manual_seed(0)
        results.append(train(is_released))
    return results


def _step(model, optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_table_has_all_optimizers_and_forty_cases():
    assert {*OPTIONS, "SparseAdam"} == {*PER_PARAMETER}
    assert len(CASES) >= 40


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # which Adagrad does not make
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_are_bit_identical_to_torch(name):
    def train(is_released):
        model = nn.EmbeddingBag(10, 4, sparse=True)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        if is_released:
            zoo.release_gradients(model, optimizer)
        for step in range(3):
            _step(model, optimizer, model(torch.tensor([[step, 1, 5]])).square().sum())
        assert not torch.equal(model.weight, before)
        return [model.weight]

    _assert_same(*_both(train))


def _trained(optimizer_class=torch.optim.SGD, **options):
    """Return a network with released gradients, its optimizer, and the result of `zoo.release_gradients`."""
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return model, optimizer, zoo.release_gradients(model, optimizer, **options)


def _loss(model: nn.Module, **options: bool) -> torch.Tensor:
    return model(torch.ones(4, 3, 5, 5) * torch.arange(4.0)[:, None, None, None], **options).square().mean()


def test_peak_has_gradients_of_one_layer_only():
    def peak(is_released):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_released:
            zoo.release_gradients(model, optimizer)
        return count_memory(lambda: model(torch.ones(1, 64)).sum(), model.parameters()).peak

    plain, released = _both(peak)
    of_layer = 64 * 65 * 4
    assert plain >= 16 * of_layer
    assert released <= 2.5 * of_layer


def test_small_gradients_are_not_released():
    def train(is_released):
        model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))
        optimizer = torch.optim.AdamW(model.parameters())
        release = zoo.release_gradients(model, optimizer) if is_released else None
        for _ in range(3):
            model(torch.ones(2, 128).cumsum(1)).square().sum().backward()
            if release is not None:
                names = [name for name, each in model.named_parameters() if isinstance(each.grad, ReleasedGradient)]
                assert names == [each.name for each in release.slots.values()] == ["0.weight", "2.weight"]
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters()]

    _assert_same(*_both(train))


@pytest.mark.parametrize(
    ("use", "remedy"),
    [
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "clip_value"),
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0), "clip_value"),
        (lambda model: model.conv.weight.grad.norm(), "clip_value"),
        (lambda model: model.conv.weight.grad * 2, "register_hook"),
        (lambda model: model.zero_grad(set_to_none=False), "register_hook"),
        (lambda model: _loss(model).backward(), "accumulate_steps"),
    ],
)
def test_released_gradient_cannot_be_read(use, remedy):
    model, optimizer, _ = _trained()
    _loss(model).backward()
    assert repr(model.conv.weight.grad) == "ReleasedGradient(conv.weight)"
    refused(ConfigError, lambda: use(model), "gradient of ", remedy)
    optimizer.step()
    assert model.conv.weight.grad is None


def _scaled_step(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(_loss(model)).backward()
    return lambda: scaler.step(optimizer)


def _backward_after_skipped_step(model, optimizer):
    _loss(model).backward()
    optimizer.zero_grad()
    return lambda: _loss(model).backward()


def _backward_through_reentrant_checkpoints_of_shared_layer(model, _):
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model.branch, x, use_reentrant=True)
    return x.sum().backward


def _hook_that_clips(model, optimizer):
    """A hook sees gradients that raise, not None, from the step after its registration on."""
    _loss(model).backward()
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1) if clips else None)
    clips = False
    _loss(model).backward()
    optimizer.step()
    clips = True
    _loss(model).backward()
    return optimizer.step


def _step_after(change):
    """Return a use that changes something between backward and step."""

    def use(model, optimizer):
        _loss(model).backward()
        with torch.no_grad():
            change(model, optimizer.param_groups[0])
        return optimizer.step

    return use


#: Preparations that return a call -> what the call's error must contain.
USES = {
    "gradient scaler": (_scaled_step, ("bfloat16",)),
    "skipped step": (_backward_after_skipped_step, ("second gradient", "optimizer.step")),
    "reentrant checkpoints": (_backward_through_reentrant_checkpoints_of_shared_layer, ("branch.",)),
    "hook that clips": (_hook_that_clips, ("norm",)),
    "closure": (lambda model, optimizer: lambda: optimizer.step(lambda: _loss(model).backward()), ("closure",)),
    "create_graph": (lambda model, _: lambda: _loss(model).backward(create_graph=True), ("create_graph",)),
    "changed lr": (_step_after(lambda _, group: group.update(lr=0.5)), ("lr of group 0",)),
    "changed momentum": (_step_after(lambda _, group: group.update(momentum=0.5)), ("momentum of group 0",)),
    "changed lr of a tensor": (_step_after(lambda _, group: group["lr"].mul_(0.5)), ("lr of group 0",)),
    "changed weight": (_step_after(lambda model, _: model.conv.weight.mul_(0.5)), ("conv.weight",)),
    "changed gradient": (
        _step_after(lambda model, _: setattr(model.conv.weight, "grad", torch.ones_like(model.conv.weight))),
        ("conv.weight",),
    ),
}


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("use", USES)
def test_unsupported_use_raises(use):
    prepare, names = USES[use]
    model = Net()
    if "tensor" in use:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zoo.release_gradients(model, optimizer)
    refused(ConfigError, prepare(model, optimizer), *names)


def test_second_loss_is_an_error_even_of_other_parameters():
    """The first backward changed weights that the second one needs: autograd or the release raises."""
    model, _, _ = _trained()
    hidden = model.first(torch.ones(2, 8))
    model.branch(hidden).sum().backward(retain_graph=True)
    message = refused((ConfigError, RuntimeError), model.last(hidden).sum().backward)
    assert "accumulate_steps" in message or "inplace" in message


def test_two_losses_are_supported():
    def train(losses):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        release = None if losses == "plain" else zoo.release_gradients(model, optimizer)
        for _ in range(2):
            output = model(torch.ones(4, 3, 5, 5))
            square, absolute = output.square().mean(), output.abs().mean()
            if losses == "summed":
                absolute = square + absolute
            else:
                with nullcontext() if release is None else release.accumulate():
                    square.backward(retain_graph=True)
            _step(model, optimizer, absolute)
        return model.last.weight.detach()

    plain, accumulated, summed = map(train, ("plain", "accumulated", "summed"))
    assert torch.equal(plain, accumulated)
    torch.testing.assert_close(plain, summed)


def test_weight_that_backward_reads_after_its_update_is_an_error():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # a reference, without which the release is garbage
    zoo.release_gradients(model, optimizer)
    first = torch.ones(1, 4, requires_grad=True)
    hidden = torch.nn.functional.linear(first * 2, model.weight.detach())  # its backward follows the update
    refused(RuntimeError, model(hidden).sum().backward, "inplace")


def test_hooks_of_gradients_and_of_steps_see_what_they_saw():
    def train(is_released):
        model, found = Net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_released:
            zoo.release_gradients(model, optimizer)
        model.last.bias.register_hook(lambda gradient: found.append(gradient.sum()))
        optimizer.register_step_pre_hook(lambda *_: found.append("before"))
        optimizer.register_step_post_hook(lambda *_: found.append(model.last.bias.detach().sum()))
        for _ in range(2):
            _step(model, optimizer, _loss(model))
        return found

    plain, released = _both(train)
    assert plain == released
    assert len(plain) == 6


def test_parameters_and_groups_that_come_later_are_released():
    torch.manual_seed(0)
    model = Net()
    model.last.requires_grad_(False)
    optimizer = torch.optim.SGD([model.conv.weight, *model.last.parameters()], lr=0.1)
    zoo.release_gradients(model, optimizer)
    for _ in range(2):
        _step(model, optimizer, _loss(model))
        model.last.requires_grad_(True)
        model.zero_grad()
    optimizer.add_param_group({"params": model.branch.parameters()})
    _loss(model).backward()
    assert isinstance(model.last.weight.grad, ReleasedGradient)
    assert type(model.branch.weight.grad) is torch.Tensor  # the step updates it
    optimizer.step()
    optimizer.zero_grad()
    _loss(model).backward()
    assert isinstance(model.branch.weight.grad, ReleasedGradient)


def test_two_optimizers_share_a_network():
    model = Net()
    of_last = torch.optim.AdamW(model.last.parameters())
    of_others = torch.optim.SGD([each for name, each in model.named_parameters() if "last" not in name], lr=0.1)
    releases = [zoo.release_gradients(model, each) for each in (of_last, of_others)]
    assert [release_of(each) for each in (of_last, of_others)] == releases
    _loss(model).backward()
    assert all(isinstance(each.grad, ReleasedGradient) for each in model.parameters())
    for each in (of_last, of_others):
        each.step()
    assert all(each.grad is None for each in model.parameters())


def test_release_can_be_ended():
    model, optimizer, release = _trained()
    release.remove()
    assert release_of(optimizer) is None
    _loss(model).backward()
    assert type(model.conv.weight.grad) is torch.Tensor
    optimizer.step()
    zoo.release_gradients(model, optimizer)


def test_copies_have_their_own_gradients_and_nothing_leaks():
    model, optimizer, release = _trained()
    twin = copy.deepcopy(model)
    _loss(twin).backward()
    assert type(twin.conv.weight.grad) is torch.Tensor
    found = weakref.ref(release)
    del model, optimizer, release
    gc.collect()
    assert found() is None


class Sam(torch.optim.Optimizer):
    """An optimizer of a user."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        """Do nothing."""


class Other(nn.Parameter):
    pass


def _sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def _of_two_dtypes():
    return nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])


def _of_two_classes():
    return nn.ParameterList([nn.Parameter(torch.ones(1)), Other(torch.ones(1))])


@pytest.mark.parametrize(
    ("model", "build", "options", "name"),
    [
        (Net, lambda model: torch.optim.LBFGS(model.parameters()), {}, "LBFGS"),
        (Net, lambda model: Sam(model.parameters()), {}, "Sam"),
        (Net, lambda model: _sgd(model, differentiable=True), {}, "differentiable"),
        (Net, lambda _: _sgd(nn.Linear(1, 1)), {}, "no parameter of the network"),
        (Net, lambda model: _sgd(model.half()), {}, "float16"),
        (Net, lambda model: zoo.release_gradients(model, _sgd(model)).optimizer, {}, "already"),
        (Net, _sgd, {"accumulate_steps": 0}, "accumulate_steps=0"),
        (Net, _sgd, {"clip_value": -1.0}, "clip_value=-1.0"),
        (Net, _sgd, {"clip_value": 0.0}, "clip_value=0.0"),
        (Net, _sgd, {"clip_value": float("nan")}, "clip_value=nan"),
        (_of_two_dtypes, lambda model: torch.optim.Adafactor(model.parameters()), {}, "Adafactor"),
        (_of_two_classes, _sgd, {}, "Other on cpu"),
    ],
)
def test_unsupported_release_raises(model, build, options, name):
    network = model()
    optimizer = build(network)
    refused(ConfigError, lambda: zoo.release_gradients(network, optimizer, **options), name)


def test_parameters_of_two_classes_are_released_without_foreach():
    model = _of_two_classes()
    zoo.release_gradients(model, _sgd(model, foreach=False))


@pytest.mark.parametrize(("model", "optimizer"), [("resnet50", None), (Net(), "SGD")])
def test_unknown_arguments_raise_type_error(model, optimizer):
    with pytest.raises(TypeError):
        zoo.release_gradients(model, optimizer)
