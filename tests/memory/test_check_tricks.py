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
from tests.remat.programs import Layers
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


class Classifier(nn.Module):
    """A network that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 12), nn.Linear(12, 4), F.cross_entropy

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x).tanh()), labels)


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


def heads(x: Tensor, body: nn.Module, main: nn.Module, auxiliary: nn.Module) -> Any:
    return main(h := body(x).tanh()), auxiliary(h)


def losses(x: Tensor, *layers: nn.Module) -> Any:
    """Return the losses by name, the most important first."""
    main, auxiliary = heads(x, *layers)
    return {"logits": main.square().mean(), "auxiliary": auxiliary.square().mean()}


def scale(x: Tensor) -> Tensor:
    return x.float() / 255 - 0.5


def pixels(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    """Scale the integers of images."""
    return head(body(scale(x)).tanh())


def words(tokens: Tensor, embedding: nn.Module, head: nn.Module) -> Tensor:
    return head(embedding(tokens).mean(1))


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs)


def features() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def bytes_of_images() -> Tensor:
    return torch.randint(256, (6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


#: Name -> a network and its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "layers": (layers, lambda: (features(),)),
    "frozen stem": (frozen_stem, lambda: (features(),)),
    "mlp": (with_last, lambda: (features(),)),
    "relu": (lambda: with_last(nn.ReLU()), lambda: (features(),)),
    "leaky relu": (lambda: with_last(nn.LeakyReLU(0.1)), lambda: (features(),)),
    "heads": (lambda: Layers(heads, linear(8, 12), linear(12, 4), linear(12, 4)), lambda: (features(),)),
    "losses": (lambda: Layers(losses, linear(8, 12), linear(12, 4), linear(12, 4)), lambda: (features(),)),
    "classifier": (Classifier, lambda: (features(), torch.tensor([0, 1, 2, 3, 1, 0]))),
    "pixels": (lambda: Layers(pixels, linear(8, 12), linear(12, 4)), lambda: (bytes_of_images(),)),
    "words": (
        lambda: Layers(words, nn.Embedding(300, 8), linear(8, 4)),
        lambda: (torch.tensor([[3, 200], [17, 254], [3, 9], [101, 5]]),),
    ),
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
    body, head = wrapped.module.layers
    scaled = scale(x)
    with recompute(scaled, lambda: scale(x)):
        hidden = body(scaled)
    return head(hidden.tanh())


def operation(
    forward: Callable[..., Any], backward: Callable[..., Any], is_once_differentiable: bool = False
) -> Callable[..., Any]:
    """Return a differentiable operation.

    Args:
    - `forward`: returns the output, and the tensors to save.
    - `backward`: returns the gradients of the inputs, from the saved tensors and the gradients of the outputs.
    """

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        return backward(*ctx.saved_tensors, *gradients)

    class Operation(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, *saved = forward(*inputs)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*saved)
            return output

    Operation.backward = staticmethod(once_differentiable(differentiate) if is_once_differentiable else differentiate)
    return Operation.apply


def write_over_output(y: Tensor, gradient: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return torch.ops.aten.tanh_backward(gradient, y)
    return torch.ops.aten.tanh_backward.grad_input(gradient, y.data, grad_input=y.data)


def assign_by_position(x: Tensor, a: Tensor, b: Tensor, *received: Tensor | None) -> tuple[Tensor | None, ...]:
    """Assign the gradients of two linear layers to their weights by position, although one may be None."""
    pairs = list(zip([each for each in received if each is not None], (a, b), strict=False))
    found = [each for gradient, _ in pairs for each in (gradient.t() @ x, gradient.sum(0))]
    return (sum(gradient @ weight for gradient, weight in pairs), *found, *[None] * (4 - len(found)))


def differentiate_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and its gradient, assuming that the loss ends the graph."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = F.cross_entropy(logits, labels)
    return loss.detach(), *torch.autograd.grad(loss, logits)


def write_over_gradient(y: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(y <= 0, 0) if gradient.requires_grad else gradient.masked_fill_(y <= 0, 0)


def add_to_grad(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
    """Add the gradient of the weight to its ``grad``, without a second tensor."""
    found = gradient.t() @ x
    weight.grad = found if weight.grad is None else weight.grad + found
    return gradient @ weight, None, gradient.sum(0)


def output_and(select: Callable[[Tensor, Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Any:
    """Return a forward that saves a tensor that ``select`` takes from the input and the output."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = function(x)
        return y, select(x, y)

    return forward


tanh_in_place = operation(output_and(lambda x, y: y, torch.tanh), write_over_output)
gelu_of_detached = operation(
    output_and(lambda x, y: x, F.gelu), lambda x, gradient: torch.ops.aten.gelu_backward(gradient, x.detach())
)
two_linears = operation(
    lambda x, a, a_bias, b, b_bias: ((F.linear(x, a, a_bias), F.linear(x, b, b_bias)), x, a, b), assign_by_position
)
loss_with_gradient = operation(differentiate_loss, lambda saved, gradient: (saved, None))
relu_in_gradient = operation(output_and(lambda x, y: y, torch.relu), write_over_gradient)
linear_into_grad = operation(lambda x, weight, bias: (F.linear(x, weight, bias), x, weight), add_to_grad)
leaky_relu_of_output = operation(
    output_and(lambda x, y: y.data, partial(F.leaky_relu, negative_slope=0.1)),
    lambda y, gradient: torch.where(y > 0, gradient, gradient * 0.1),
)


tanh_once = operation(
    output_and(lambda x, y: y, torch.tanh),
    lambda y, gradient: torch.ops.aten.tanh_backward(gradient, y),
    is_once_differentiable=True,
)


def apply(function: Callable[[Tensor], Tensor]) -> Callable[[Wrapped, Tensor], Tensor]:
    """Return a function that applies another one in place of an activation, in training mode."""
    return lambda wrapped, x: function(x) if wrapped.training else wrapped.module(x)


def share_input(wrapped: Wrapped, x: Tensor) -> Any:
    body, main, auxiliary = wrapped.module.layers
    return two_linears(body(x).tanh(), *main.parameters(), *auxiliary.parameters())


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
        "layers", replacing(nn.Tanh, apply(tanh_in_place)), "retained graph, gradient of 3.bias:"
    ),
    "first derivatives alone": (
        "mlp", replacing(nn.GELU, apply(gelu_of_detached)), "second derivatives, gradient of 0.bias:"
    ),
    "gradients of all outputs": (
        "heads", around(share_input), "gradients of inputs, gradient of layers.2.bias: None instead of"
    ),
    "loss at the end of the graph": (
        "classifier",
        changing(lambda model: setattr(model, "loss", loss_with_gradient)),
        "retained graph, gradient of head.bias:",
    ),
    "gradient in the memory of the incoming one": (
        "relu", replacing(nn.ReLU, apply(relu_in_gradient)), "gradients of inputs, gradient of the caller:"
    ),
    "gradient added without autograd": (
        "layers",
        replacing(nn.Linear, lambda wrapped, x: linear_into_grad(x, *wrapped.module.parameters())),
        "retained graph, gradients['0.weight']: None instead of",
    ),
    "input in the memory of the caller": (
        "pixels", around(scale_again), "overwritten inputs, gradient of layers.0.weight:"
    ),
    "output of the same input object": (
        "frozen stem", around(cache_stem), "refilled inputs, output of the second batch:"
    ),
    "output in the memory of the caller": (
        "leaky relu", replacing(nn.LeakyReLU, apply(leaky_relu_of_output)), "overwritten outputs, gradient of 2.bias:"
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


def test_scenario_that_fails_in_plain_training_is_skipped() -> None:
    found = zoo.check(with_last(Layers(tanh_once)), features())
    assert found.same is True
    assert "second derivatives" in found.skipped
    assert "autocast" in found.scenarios
    assert "\nnot compared, as plain training fails: second derivatives, " in str(found)


def test_error_of_variant_alone_is_no_difference_and_is_reported() -> None:
    found = checked("layers", replacing(nn.Tanh, apply(tanh_once)))
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
    "dict": (after(lambda model: model.seen.update(rows=model.seen["rows"] - 1)), "['seen']['rows']:"),
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
    dropout = Wrapped(nn.Identity(), lambda wrapped, x: F.dropout(x, 0.25, wrapped.training))
    assert checked("layers", lambda model: nn.Sequential(*model[:5], dropout, model[6])).same is True


def test_parts_preserve_mode_and_settings() -> None:
    model = layers()
    model[1].eval()
    model[3].requires_grad_(False)
    found = zoo.check(model, features())
    assert (found.same, found.fixed) == (True, ())
    assert [each.training for each in model] == [index != 1 for index in range(len(model))]
    assert [each.requires_grad for each in model.parameters()] == [True] * 4 + [False] * 2 + [True] * 2
    assert model[5].p == 0.25
