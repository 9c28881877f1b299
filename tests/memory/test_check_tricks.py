"""`zoo.check` finds tricks that are bit-identical to plain training except in one ordinary situation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

import zoo
from tests.memory.variants import Variant, Wrapped, around, assert_found, changing, recompute, replacing
from zoo.memory.scenarios import SCENARIOS


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12),
        nn.GELU(),
        nn.Linear(12, 12),
        nn.Tanh(),
        nn.Dropout(0.25),
        nn.Linear(12, 4),
    )


def frozen_stem() -> nn.Sequential:
    network = layers()
    network[0].requires_grad_(False)
    return network


def with_last(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4), *last)


class Heads(nn.Module):
    """A network with a main and an auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.auxiliary = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x).tanh()
        return self.main(x), self.auxiliary(x)


class Losses(Heads):
    """A network that returns its losses by name, the most important first."""

    def forward(self, x: Tensor) -> Any:
        main, auxiliary = super().forward(x)
        return {"logits": main.square().mean(), "auxiliary": auxiliary.square().mean()}


class Classifier(nn.Module):
    """A network that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 12), nn.Linear(12, 4), F.cross_entropy

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x).tanh()), labels)


class FromPixels(nn.Module):
    """A network that scales the integers of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def scale(self, x: Tensor) -> Tensor:
        return x.float() / 255 - 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.scale(x)).tanh())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


class Annealed(nn.Module):
    """A layer with a temperature that falls every 16 passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return torch.tanh(x / (1 + 1 / (1 + self.passes // 16)))


class NormalizedLinear(nn.Linear):
    """A linear layer whose rows have norm 1."""

    def normalized(self) -> Tensor:
        return self.weight / self.weight.norm(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalized(), self.bias)


def features() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def pixels() -> Tensor:
    return torch.randint(256, (6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


#: Name -> a network and its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "layers": (layers, lambda: (features(),)),
    "frozen stem": (frozen_stem, lambda: (features(),)),
    "mlp": (with_last, lambda: (features(),)),
    "relu": (lambda: with_last(nn.ReLU()), lambda: (features(),)),
    "leaky relu": (lambda: with_last(nn.LeakyReLU(0.1)), lambda: (features(),)),
    "heads": (Heads, lambda: (features(),)),
    "losses": (Losses, lambda: (features(),)),
    "classifier": (Classifier, lambda: (features(), torch.tensor([0, 1, 2, 3, 1, 0]))),
    "pixels": (FromPixels, lambda: (pixels(),)),
    "words": (Words, lambda: (torch.tensor([[3, 200], [17, 254], [3, 9], [101, 5]]),)),
    "annealed": (lambda: nn.Sequential(nn.Linear(8, 12), Annealed(), nn.Linear(12, 4)), lambda: (features(),)),
    "normalized": (lambda: nn.Sequential(*with_last()[:2], NormalizedLinear(12, 4)), lambda: (features(),)),
}


def checked(network: str, variant: Variant = zoo.lean) -> Any:
    """Return the check of a variant of a network."""
    build, inputs = NETWORKS[network]
    torch.manual_seed(0)
    return zoo.check(build(), *inputs(), variant=variant)


@pytest.mark.parametrize("network", NETWORKS)
def test_lean_is_bit_identical_in_each_scenario(network: str) -> None:
    found = checked(network)
    assert (found.same, found.difference, found.fixed) == (True, None, ())
    left_out = {*found.skipped, *(each.split(" (")[0] for each in found.errors)}
    assert {*found.scenarios} | left_out == {each.name for each in SCENARIOS}
    assert left_out <= {"overwritten outputs", "overwritten inputs"}


class Ring(nn.Module):
    """Saves the tensors of the last ``size`` calls."""

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.module, self.size, self.call = module, size, 0
        self.slots: dict[tuple[int, int], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.call, self.count = self.call + torch.is_grad_enabled(), 0
        with saved_tensors_hooks(self.pack, lambda slot: self.slots[slot]):
            return self.module(x)

    def pack(self, tensor: Tensor) -> tuple[int, int]:
        self.count += 1
        self.slots[self.call % self.size, self.count] = tensor.detach()
        return self.call % self.size, self.count


class Queue(nn.Module):
    """Saves tensors by call. Backward reads the call at an ``end``, which the first parameter's gradient removes."""

    def __init__(self, module: nn.Module, end: int) -> None:
        super().__init__()
        self.module, self.end = module, end
        self.calls: deque[list[Tensor]] = deque()
        next(module.parameters()).register_post_accumulate_grad_hook(lambda _: self.calls.__delitem__(end))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls.append([])
        with saved_tensors_hooks(self.pack, lambda index: self.calls[self.end][index]):
            return self.module(x)

    def pack(self, tensor: Tensor) -> int:
        self.calls[-1].append(tensor.detach())
        return len(self.calls[-1]) - 1


def recompute_input(start: int, layer: int) -> Variant:
    """Return a variant that recomputes the input of a layer in backward, from the layer ``start`` on."""

    def run(wrapped: Wrapped, x: Tensor) -> Tensor:
        before, layer = wrapped.module
        state, y = torch.get_rng_state(), before(x)

        def again() -> Tensor:
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                return before(x.detach()).to(y.dtype)

        with recompute(y, again):
            return layer(y)

    return lambda model: nn.Sequential(
        *model[:start], Wrapped(nn.Sequential(model[start:layer], model[layer]), run), *model[layer + 1 :]
    )


def recompute_norm(model: nn.Sequential) -> nn.Module:
    """Recompute the input of the GELU in backward, and update the statistics of the norm only there."""

    def run(wrapped: Wrapped, x: Tensor) -> Tensor:
        norm, layer = wrapped.module
        if not norm.training:
            return layer(norm(x))
        y = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        with recompute(y, lambda: norm(x.detach())):
            return layer(y)

    return nn.Sequential(model[0], Wrapped(model[1:3], run), *model[3:])


def scale_again(wrapped: Wrapped, x: Tensor) -> Tensor:
    """Save the caller's byte images instead of scaled numbers."""
    model = wrapped.module
    scaled = model.scale(x)
    with recompute(scaled, lambda: model.scale(x)):
        hidden = model.body(scaled)
    return model.head(hidden.tanh())


class TanhInPlace(Function):
    """Writes the gradient over the saved output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.ops.aten.tanh_backward(gradient, y)
        return torch.ops.aten.tanh_backward.grad_input(gradient, y.data, grad_input=y.data)


class TanhOnce(TanhInPlace):
    """Raises an error for second derivatives."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gradient, ctx.saved_tensors[0])


class GeluOfDetached(Function):
    """Computes the gradient from a detached input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(gradient, ctx.saved_tensors[0].detach())


class TwoLinears(Function):
    """Saves the input of two layers once, and assigns gradients to the layers by position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, a_bias: Tensor, b: Tensor, b_bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, a, b)
        return F.linear(x, a, a_bias), F.linear(x, b, b_bias)

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        pairs = list(zip([each for each in received if each is not None], weights, strict=False))
        found = [each for gradient, _ in pairs for each in (gradient.t() @ x, gradient.sum(0))]
        return (sum(gradient @ weight for gradient, weight in pairs), *found, *[None] * (4 - len(found)))


def share_input(wrapped: Wrapped, x: Tensor) -> Any:
    body, main, auxiliary = wrapped.module.children()
    return TwoLinears.apply(body(x).tanh(), *main.parameters(), *auxiliary.parameters())


class GradientOfLoss(Function):
    """Saves the gradient of a loss instead of probabilities. Assumes that the loss ends the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = F.cross_entropy(logits, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, logits))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class ReluInGradient(Function):
    """Computes the gradient in the memory of the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.relu()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dead = ctx.saved_tensors[0] <= 0
        return gradient.masked_fill(dead, 0) if gradient.requires_grad else gradient.masked_fill_(dead, 0)


class LinearIntoGrad(Function):
    """Adds the gradient of the weight to its ``grad``, without a second tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        found = gradient.t() @ x
        weight.grad = found if weight.grad is None else weight.grad + found
        return gradient @ weight, None, gradient.sum(0)


class LeakyReluOfOutput(Function):
    """Saves the output instead of the input, although the caller may overwrite it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.leaky_relu(x, 0.1)
        ctx.output = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(ctx.output > 0, gradient, gradient * 0.1)


def apply(function: type[Function]) -> Callable[[Wrapped, Tensor], Tensor]:
    """Return a function that applies another one in place of an activation, in training mode."""
    return lambda wrapped, x: function.apply(x) if wrapped.training else wrapped.module(x)


def store_rate(model: nn.Sequential) -> nn.Module:
    """Store the rate of dropout when the variant is built."""
    rate = model[5].p
    model[5].forward = lambda x: F.dropout(x, rate, model[5].training)
    return model


def cache_stem(wrapped: Wrapped, x: Tensor) -> Tensor:
    """Compute the output of a frozen layer once per input object."""
    if wrapped.kept is None or wrapped.kept[0] is not x:
        wrapped.kept = x, wrapped.module[0](x)
    return wrapped.module[1:](wrapped.kept[1])


def detach_frozen(model: nn.Sequential) -> nn.Module:
    """Save no input of the layers that are frozen when the variant is built."""
    for each in model:
        if isinstance(each, nn.Linear) and not each.weight.requires_grad:
            each.forward = lambda x, each=each: F.linear(x, each.weight.detach(), each.bias.detach())
    return model


def normalize_once(wrapped: Wrapped, x: Tensor) -> Tensor:
    """Save the normalized weight until the optimizer changes the weight."""
    layer, weight = wrapped.module, wrapped.module.normalized()
    if wrapped.kept is None or wrapped.kept[0] != layer.weight._version:
        wrapped.kept = layer.weight._version, weight.detach()
    memory, kept = weight.data_ptr(), wrapped.kept[1]
    with saved_tensors_hooks(
        lambda tensor: (tensor.shape, tensor.stride()) if tensor.data_ptr() == memory else tensor,
        lambda saved: saved if isinstance(saved, Tensor) else kept.as_strided(*saved),
    ):
        return F.linear(x, weight, layer.bias)


def free_dropout(wrapped: Wrapped, x: Tensor) -> Tensor:
    """Free a module that evaluation does not need."""
    if not wrapped.training:
        wrapped.module[5] = nn.Identity()
    return wrapped.module(x)


def share_buffer(model: nn.Module) -> None:
    """Keep all gradients in one buffer."""
    parameters = list(model.parameters())
    views = torch.zeros(sum(each.numel() for each in parameters)).split([each.numel() for each in parameters])

    def move(parameter: Tensor, view: Tensor) -> None:
        if parameter.grad.data_ptr() != view.data_ptr() and not parameter.grad.requires_grad:
            parameter.grad = view.view_as(parameter).copy_(parameter.grad)

    for parameter, view in zip(parameters, views, strict=True):
        parameter.register_post_accumulate_grad_hook(partial(move, view=view))


def round_after_warmup(wrapped: Wrapped, x: Tensor) -> Tensor:
    """Save tensors in half precision after twelve calls."""
    with saved_tensors_hooks(lambda tensor: tensor.bfloat16() if wrapped.calls > 12 else tensor, Tensor.float):
        return wrapped.module(x)


#: Trick -> network, variant, and the start of the difference that a check must find.
TRICKS: dict[str, tuple[str, Variant, str]] = {
    "saved tensors of the last call": (
        "layers", partial(Ring, size=1), "three passes before backward, gradient of 6.weight:"
    ),
    "saved tensors of two calls": (
        "layers", partial(Ring, size=2), "three passes before backward, gradient of 6.weight:"
    ),
    "saved tensors of the oldest call first": (
        "layers", partial(Queue, end=0), "three passes before backward, gradient of 6.weight:"
    ),
    "saved tensors of the newest call first": (
        "layers", partial(Queue, end=-1), "three passes before backward, gradient of 6.weight:"
    ),
    "mode of backward": ("layers", recompute_input(5, 6), "evaluation before backward, gradient of 6.weight:"),
    "autocast of backward": ("mlp", recompute_input(0, 2), "autocast, gradient of 2.weight:"),
    "calls counted twice": ("annealed", recompute_input(1, 2), "evaluation, changed attributes['1.passes']:"),
    "statistics in backward": ("layers", recompute_norm, "evaluation before backward, output:"),
    "gradient over the saved output": (
        "layers", replacing(nn.Tanh, apply(TanhInPlace)), "retained graph, gradient of 3.bias:"
    ),
    "first derivatives alone": (
        "mlp", replacing(nn.GELU, apply(GeluOfDetached)), "second derivatives, gradient of 0.bias:"
    ),
    "gradients of all outputs": (
        "heads", around(share_input), "gradients of inputs, gradient of auxiliary.bias: None instead of"
    ),
    "loss at the end of the graph": (
        "classifier",
        changing(lambda model: setattr(model, "loss", GradientOfLoss.apply)),
        "retained graph, gradient of head.bias:",
    ),
    "gradient in the memory of the incoming one": (
        "relu", replacing(nn.ReLU, apply(ReluInGradient)), "gradients of inputs, gradient of the caller:"
    ),
    "gradient added without autograd": (
        "layers",
        replacing(nn.Linear, lambda wrapped, x: LinearIntoGrad.apply(x, *wrapped.module.parameters())),
        "retained graph, gradients['0.weight']: None instead of",
    ),
    "input in the memory of the caller": (
        "pixels", around(scale_again), "overwritten inputs, gradient of body.weight:"
    ),
    "output of the same input object": (
        "frozen stem", around(cache_stem), "refilled inputs, output of the second batch:"
    ),
    "output in the memory of the caller": (
        "leaky relu", replacing(nn.LeakyReLU, apply(LeakyReluOfOutput)), "overwritten outputs, gradient of 2.bias:"
    ),
    "layers frozen when built": (
        "frozen stem", detach_frozen, "other frozen parameters and dropout rates, gradient of 0.bias: None"
    ),
    "dropout rate when built": ("layers", store_rate, "other frozen parameters and dropout rates, output:"),
    "weight changed without a version": (
        "normalized", replacing(NormalizedLinear, normalize_once), "evaluation between steps, gradient of 0.bias:"
    ),
    "dropout freed by evaluation": (
        "layers", around(free_dropout), "three passes before backward, gradient of 6.bias:"
    ),
    "outputs sorted by name": (
        "losses",
        around(lambda wrapped, x: dict(sorted(wrapped.module(x).items()))),
        "step 1, output: dict of ['auxiliary'], ['logits'] instead of",
    ),
    "gradients in one buffer": (
        "layers",
        changing(share_buffer),
        "evaluation between steps, gradients of the first step, after the second['0.weight']:",
    ),
    "half precision after twelve calls": (
        "layers", around(round_after_warmup), "evaluation between steps, gradient of 6.weight:"
    ),
}  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS)
def test_fault_of_trick_is_found_and_named(trick: str) -> None:
    network, variant, text = TRICKS[trick]
    assert_found(checked(network, variant), text)


@pytest.mark.parametrize("trick", ["saved tensors of the last call", "output in the memory of the caller"])
def test_fault_after_scenario_with_error_is_found(trick: str) -> None:
    def refuse_autocast(wrapped: Wrapped, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("autocast")
        return wrapped.module(x)

    network, variant, text = TRICKS[trick]
    assert_found(checked(network, lambda model: Wrapped(variant(model), refuse_autocast)), text)


class TanhOnceInNetwork(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TanhOnce.apply(x)


def test_scenario_that_fails_in_plain_training_is_skipped() -> None:
    found = zoo.check(with_last(TanhOnceInNetwork()), features())
    assert found.same is True
    assert "second derivatives" in found.skipped
    assert "autocast" in found.scenarios
    assert "\nnot compared, as plain training fails: second derivatives, " in str(found)


def test_error_of_variant_alone_is_no_difference_and_is_reported() -> None:
    found = checked("layers", replacing(nn.Tanh, apply(TanhOnce)))
    assert found.same is True
    assert found.skipped == ("overwritten inputs",)
    (error,) = found.errors
    assert error.startswith("second derivatives (RuntimeError: trying to differentiate twice")
    assert "\nthe variant alone raises an error: second derivatives (" in str(found)


def test_nondeterministic_scenario_is_skipped() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noise = random.SystemRandom().random() if torch.is_autocast_enabled("cpu") else 0
            return super().forward(x) * (1 + 9 * noise)

    found = zoo.check(with_last(Noisy(4, 4)), features())
    assert found.same is True
    assert "autocast" in found.skipped
    assert "second derivatives" in found.scenarios


class Stateful(nn.Module):
    """A network with state of several kinds in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.calls, self.sizes, self.last, self.seen = 0, [0], torch.zeros(4), {"rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.calls += 1
        self.sizes.append(len(x))
        self.last = y.detach()[-1]
        self.seen["rows"] += len(x)
        return y


def after(change: Callable[[Any], object]) -> Variant:
    """Return a variant that changes the network after each pass."""
    return around(lambda wrapped, x: (wrapped.module(x), change(wrapped.module))[0])


def replace_layer(model: Stateful) -> None:
    own = Wrapped(nn.Identity(), lambda wrapped, x: F.linear(x, wrapped.weight, wrapped.bias))
    own.weight, own.bias = model.layer.weight, model.layer.bias
    model.layer = own


#: Variant -> the start of the difference; None for correct variants.
STATES: dict[str, tuple[Variant, str | None]] = {
    "number": (after(lambda model: setattr(model, "calls", model.calls + 1)), "['calls']:"),
    "list": (after(lambda model: model.sizes.append(0)), "['sizes']:"),
    "tensor": (after(lambda model: setattr(model, "last", model.last * 2)), "['last']:"),
    "dict": (after(lambda model: model.seen.update(rows=0)), "['seen']['rows']:"),
    "mode of a part": (after(lambda model: setattr(model.layer, "training", False)), ":"),
    "none": (after(lambda _: None), None),
    "other layer": (changing(replace_layer), None),
    "new attribute": (changing(lambda model: setattr(model, "checkpoints", True)), None),
}


@pytest.mark.parametrize("state", STATES)
def test_attributes_that_training_changes_are_compared(state: str) -> None:
    variant, text = STATES[state]
    found = zoo.check(Stateful(), features(), variant=variant)
    if text is None:
        assert found.same is True
    else:
        assert_found(found, f"evaluation, changed attributes{text}")


def test_dropout_of_other_class_is_bit_identical() -> None:
    """A check changes the rates of `nn.Dropout` only."""
    variant = replacing(nn.Dropout, lambda wrapped, x: F.dropout(x, 0.25, wrapped.training))
    assert checked("layers", variant).same is True


def test_parts_preserve_mode_and_settings() -> None:
    model = layers()
    model[1].eval()
    model[3].requires_grad_(False)
    found = zoo.check(model, features())
    assert (found.same, found.fixed) == (True, ())
    assert [each.training for each in model] == [index != 1 for index in range(len(model))]
    assert [each.requires_grad for each in model.parameters()] == [True] * 4 + [False] * 2 + [True] * 2
    assert model[5].p == 0.25
