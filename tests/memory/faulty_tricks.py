"""Faulty ways to save memory. Each is bit-identical to plain training except in one ordinary situation.

A trick has a network, a variant of it, and a witness: a few lines of ordinary training that the fault changes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Trick(NamedTuple):
    """A variant with a fault.

    Args:
    - `build`: returns the network.
    - `inputs`: returns a batch.
    - `variant`: returns the variant of a network.
    - `witness`: trains a network, and returns the results that a user sees.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    variant: Callable[[nn.Module], nn.Module]
    witness: Callable[[nn.Module], Sequence[Tensor]]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int = 0, size: int = 6, width: int = 8) -> Tensor:
    return torch.randn(size, width, generator=generator(seed))


def features() -> tuple[Tensor]:
    return (batch(),)


def pixels(seed: int = 0) -> Tensor:
    return torch.randint(256, (6, 8), generator=generator(seed), dtype=torch.uint8)


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


def with_last(*last: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4), *last)


class Heads(nn.Module):
    """A network with a main and an auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.auxiliary = nn.Linear(8, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).tanh()
        return self.main(x), self.auxiliary(x)


class Losses(Heads):
    """A network that returns its losses by name, the most important first."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        main, auxiliary = super().forward(x)
        return {"logits": main.square().mean(), "auxiliary": auxiliary.square().mean()}


class Classifier(nn.Module):
    """A network that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x).tanh()), labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


def labeled() -> tuple[Tensor, Tensor]:
    return batch(), torch.tensor([0, 1, 2, 3, 1, 0])


class FromPixels(nn.Module):
    """A network that scales the integers of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.scale(x)).tanh())

    def scale(self, x: Tensor) -> Tensor:
        return x.float() / 255 - 0.5


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

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.normalized(), self.bias)

    def normalized(self) -> Tensor:
        return self.weight / self.weight.norm(dim=1, keepdim=True)


def step(model: nn.Module, x: Any, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    loss = loss_of(model(x))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def loss_of(output: Any) -> Tensor:
    outputs = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, dict) else output
    return sum(each.square().mean() for each in outputs)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros(1) if each.grad is None else each.grad for each in model.parameters()]


def train_on_two_views(model: nn.Module) -> Sequence[Tensor]:
    """Contrast the outputs of two views of a batch."""
    (model(batch(1)) - model(batch(2))).square().mean().backward()
    return gradients(model)


def skip_step(model: nn.Module) -> Sequence[Tensor]:
    """Skip the backward pass of a batch, as if its loss were not finite."""
    optimizer = sgd(model)
    for seed in range(3):
        loss = loss_of(model(batch(seed)))
        if seed != 1:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def evaluate_before_backward(model: nn.Module) -> Sequence[Tensor]:
    """Log the accuracy of the current weights before backward."""
    loss = loss_of(model(batch(1)))
    model.eval()
    with torch.no_grad():
        model(batch(2))
    loss.backward()
    return gradients(model)


def train_under_autocast(model: nn.Module) -> Sequence[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(batch(1)))
    loss.backward()
    return gradients(model)


def back_propagate_twice(model: nn.Module) -> Sequence[Tensor]:
    """Look at the gradients of a loss, then use them."""
    loss = loss_of(model(batch(1)))
    torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad], retain_graph=True)
    loss.backward()
    return gradients(model)


def penalize_gradients(model: nn.Module) -> Sequence[Tensor]:
    x = batch(1).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    gradient.norm(dim=1).sub(1).square().mean().backward()
    return gradients(model)


def train_second_output(model: nn.Module) -> Sequence[Tensor]:
    model(batch(1))[1].square().mean().backward()
    return gradients(model)


def average_losses(model: nn.Module) -> Sequence[Tensor]:
    """Accumulate the mean loss of two micro-batches."""
    for seed in range(2):
        (model(batch(seed), torch.tensor([0, 1, 2, 3, 1, 0])) / 2).backward()
    return gradients(model)


def start_backward_from_gradient(model: nn.Module) -> Sequence[Tensor]:
    """Continue the backward pass of another process, and log the gradient."""
    gradient = batch(3, width=4)
    model(batch(1)).backward(gradient)
    return [*gradients(model), gradient]


def scale_gradients(model: nn.Module) -> Sequence[Tensor]:
    """Compute the gradients as values, scale them, and assign them."""
    parameters = [*model.parameters()]
    found = torch.autograd.grad(loss_of(model(batch(1))), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = None if gradient is None else gradient * 0.1
    return gradients(model)


def refill_buffer_before_backward(model: nn.Module) -> Sequence[Tensor]:
    """Load the next batch into the same memory while backward has not run."""
    x = pixels(1)
    loss = loss_of(model(x))
    x.copy_(pixels(2))
    loss.backward()
    return gradients(model)


def train_from_static_buffer(model: nn.Module) -> Sequence[Tensor]:
    optimizer, x = sgd(model), torch.empty(6, 8)
    for seed in range(3):
        step(model, x.copy_(batch(seed)), optimizer)
    return list(model.parameters())


def subtract_target_in_place(model: nn.Module) -> Sequence[Tensor]:
    output = model(batch(1))
    output.sub_(batch(2, width=4)).square().mean().backward()
    return gradients(model)


def unfreeze(model: nn.Module) -> Sequence[Tensor]:
    """Train the head, then all layers."""
    step(model, batch(1), sgd(model))
    model.requires_grad_(True)
    step(model, batch(2))
    return gradients(model)


def raise_dropout_rate(model: nn.Module) -> Sequence[Tensor]:
    optimizer = sgd(model)
    for rate in (0.25, 0.5):
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.p = rate
        torch.manual_seed(1)
        step(model, batch(1), optimizer)
    return list(model.parameters())


def log_activations(model: nn.Module) -> Sequence[Tensor]:
    found: list[Tensor] = []
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.register_forward_hook(lambda module, args, output: found.append(output.detach().std()))
    step(model, batch(1))
    return [torch.tensor(len(found)), *found]


def evaluate_old_copy(model: nn.Module) -> Sequence[Tensor]:
    """Keep a copy of the network, as a teacher or for the average of weights."""
    teacher = copy.deepcopy(model).eval()
    step(model, batch(1), sgd(model))
    return [teacher(batch(2))]


def minimize_sharpness(model: nn.Module) -> Sequence[Tensor]:
    """Compute the gradients of weights that are moved along their gradients."""
    step(model, batch(1))
    for each in model.parameters():
        each.data.add_(each.grad)
    model.zero_grad()
    step(model, batch(1))
    return gradients(model)


def estimate_statistics(model: nn.Module) -> Sequence[Tensor]:
    """Estimate the statistics of batch norms anew after training."""
    step(model, batch(1), sgd(model))
    with torch.no_grad():
        for seed in range(3):
            model(batch(seed))
    return list(model.buffers())


def evaluate_between_epochs(model: nn.Module) -> Sequence[Tensor]:
    optimizer = sgd(model)
    for epoch in range(2):
        model.train()
        torch.manual_seed(epoch)
        step(model, batch(epoch), optimizer)
        model.eval()
        with torch.no_grad():
            model(batch(5))
    return list(model.parameters())


def train_for_steps(model: nn.Module) -> Sequence[Tensor]:
    optimizer = sgd(model)
    for seed in range(20):
        step(model, batch(seed), optimizer)
    return list(model.parameters())


def weight_losses(model: nn.Module) -> Sequence[Tensor]:
    """Weight the losses in the order in which the network returns them."""
    sum(weight * loss for weight, loss in zip((1.0, 0.1), model(batch(1)).values(), strict=True)).backward()
    return gradients(model)


def compare_gradients(model: nn.Module) -> Sequence[Tensor]:
    """Measure the change of the gradients from one batch to the next."""
    step(model, batch(1))
    before = [each.grad for each in model.parameters()]
    model.zero_grad()
    step(model, batch(2))
    return [each.grad - other for each, other in zip(model.parameters(), before, strict=True)]


def train_on_rare_words(model: nn.Module) -> Sequence[Tensor]:
    step(model, torch.tensor([[3, 299], [280, 7]]))
    return gradients(model)


def train_on_large_batch(model: nn.Module) -> Sequence[Tensor]:
    step(model, batch(1, size=1024))
    return gradients(model)


def train_in_double_precision(model: nn.Module) -> Sequence[Tensor]:
    step(model.double(), batch(1).double())
    return gradients(model)


class Packed(nn.Module):
    """Base class of networks that transform saved tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.module(*args)

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, kept: Any) -> Tensor:
        return kept


class LastCall(Packed):
    """Saves the tensors of one call in slots that the next call reuses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.slots: dict[int, Tensor] = {}
        self.count = 0

    def forward(self, *args: Any) -> Any:
        self.count = 0
        return super().forward(*args)

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        self.slots[self.count] = tensor.detach()
        return self.count

    def unpack(self, kept: int) -> Tensor:
        return self.slots[kept]


class OldestFirst(Packed):
    """Saves a queue of calls. Backward reads the oldest call; the first parameter's gradient removes it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls: deque[list[Tensor]] = deque()
        next(module.parameters()).register_post_accumulate_grad_hook(self.remove_oldest)

    def forward(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            self.calls.append([])
        return super().forward(*args)

    def remove_oldest(self, _: Tensor) -> None:
        self.calls.popleft()

    def pack(self, tensor: Tensor) -> int:
        self.calls[-1].append(tensor.detach())
        return len(self.calls[-1]) - 1

    def unpack(self, kept: int) -> Tensor:
        return self.calls[0][kept]


class BFloat16AboveSize(Packed):
    """Saves large tensors in half precision."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor.bfloat16() if tensor.is_floating_point() and tensor.numel() > 4096 else tensor

    def unpack(self, kept: Tensor) -> Tensor:
        return kept.float() if kept.dtype is torch.bfloat16 else kept


class BFloat16AfterWarmup(Packed):
    """Saves tensors in half precision after twelve calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls = 0

    def forward(self, *args: Any) -> Any:
        self.calls += torch.is_grad_enabled()
        return super().forward(*args)

    def pack(self, tensor: Tensor) -> Any:
        return tensor.bfloat16() if self.calls > 12 else tensor

    def unpack(self, kept: Tensor) -> Tensor:
        return kept.float()


class SinglePrecision(Packed):
    """Saves tensors in at most single precision."""

    def pack(self, tensor: Tensor) -> Any:
        return (tensor.float() if tensor.dtype is torch.float64 else tensor), tensor.dtype

    def unpack(self, kept: Any) -> Tensor:
        return kept[0].to(kept[1])


class BytesForTokens(Packed):
    """Saves integers as single bytes."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor.byte() if tensor.dtype is torch.int64 else tensor

    def unpack(self, kept: Tensor) -> Tensor:
        return kept.long() if kept.dtype is torch.uint8 else kept


class Again(nn.Module):
    """A layer whose input backward recomputes.

    Args:
    - `before`: the module that computes the input.
    - `layer`: the layer.
    """

    def __init__(self, before: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = self.before(x)

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == y_memory and tensor.shape == y_shape else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.random.fork_rng(), torch.no_grad():
                torch.set_rng_state(state)
                return self.again(x.detach()).to(y_type)

        y_memory, y_shape, y_type = y.data_ptr(), y.shape, y.dtype
        with saved_tensors_hooks(pack, unpack):
            return self.layer(y)

    def again(self, x: Tensor) -> Tensor:
        return self.before(x)


def again_in_mode_of_backward(model: nn.Module) -> nn.Module:
    """Recompute the dropout of a network in the mode that it has in backward."""
    return nn.Sequential(*model[:5], Again(model[5], model[6]))


def again_in_autocast_of_backward(model: nn.Module) -> nn.Module:
    """Recompute two layers of a network under the autocast of backward."""
    return nn.Sequential(Again(model[:2], model[2]), *model[3:])


def again_with_counter(model: nn.Module) -> nn.Module:
    """Recompute a layer that counts its calls."""
    return nn.Sequential(model[0], Again(model[1], model[2]))


class StatisticsAgain(Again):
    """Recomputes a batch norm in backward, and updates its statistics only there."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.before
        if not norm.training:
            return self.layer(norm(x))
        y = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        memory = y.data_ptr()

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == memory else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.no_grad():
                return norm(x.detach())

        with saved_tensors_hooks(pack, unpack):
            return self.layer(y)


def statistics_in_backward(model: nn.Module) -> nn.Module:
    return nn.Sequential(model[0], StatisticsAgain(model[1], model[2]), *model[3:])


class ScaledAgain(nn.Module):
    """Saves the caller's byte images instead of scaled numbers."""

    def __init__(self, model: FromPixels) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.module.scale(x)
        memory, shape = scaled.data_ptr(), scaled.shape

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == memory and tensor.shape == shape else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            return self.module.scale(x) if kept is None else kept

        with saved_tensors_hooks(pack, unpack):
            hidden = self.module.body(scaled)
        return self.module.head(hidden.tanh())


class TanhInPlace(torch.autograd.Function):
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


class GeluOfDetached(torch.autograd.Function):
    """Computes the gradient from a detached input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(gradient, ctx.saved_tensors[0].detach())


class TwoLinears(torch.autograd.Function):
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


class GradientOfLoss(torch.autograd.Function):
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


class ReluInGradient(torch.autograd.Function):
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


class LinearIntoGrad(torch.autograd.Function):
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


class LeakyReluOfOutput(torch.autograd.Function):
    """Saves the output instead of the input, although the caller may overwrite it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.leaky_relu(x, 0.1)
        ctx.output = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(ctx.output > 0, gradient, gradient * 0.1)


class DropoutMask(torch.autograd.Function):
    """Saves a mask of one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        noise = F.dropout(torch.ones_like(x), rate)
        ctx.save_for_backward(noise != 0)
        ctx.rate = rate
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0].to(gradient.dtype).div_(1 - ctx.rate), None


class Applied(nn.Module):
    """A module whose training runs another function."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor], *arguments: Any) -> None:
        super().__init__()
        self.module, self.function, self.arguments = module, function, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments) if self.training else self.module(x)


def replacing(kind: type[nn.Module], function: Any) -> Callable[[nn.Module], nn.Module]:
    """Return a variant that applies a function instead of activations of a kind."""

    def variant(model: nn.Sequential) -> nn.Module:
        return nn.Sequential(*(Applied(each, function.apply) if isinstance(each, kind) else each for each in model))

    return variant


def masked_with_rate(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(
        *(Applied(each, DropoutMask.apply, each.p) if isinstance(each, nn.Dropout) else each for each in model)
    )


class IntoGrad(nn.Module):
    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return LinearIntoGrad.apply(x, self.module.weight, self.module.bias)


def accumulating_into_grad(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*(IntoGrad(each) if isinstance(each, nn.Linear) else each for each in model))


def sharing_input(model: Heads) -> nn.Module:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, x: Tensor) -> Any:
            main, auxiliary = self.module.main, self.module.auxiliary
            x = self.module.body(x).tanh()
            return TwoLinears.apply(x, main.weight, main.bias, auxiliary.weight, auxiliary.bias)

    return Sharing()


def fusing_loss(model: Classifier) -> nn.Module:
    model.loss = GradientOfLoss.apply
    return model


class StemOfInput(nn.Module):
    """Caches the output of a frozen layer for further passes on the same batch."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.stem, self.rest = model[0], model[1:]
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x is not self.input:
            self.input, self.output = x, self.stem(x)
        return self.rest(self.output)


class WithoutInput(nn.Module):
    """A layer that saves no input, because its weight is frozen."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.module.weight.detach(), self.module.bias.detach())


def without_inputs_of_frozen(model: nn.Sequential) -> nn.Module:
    def is_frozen(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and not any(each.requires_grad for each in module.parameters())

    return nn.Sequential(*(WithoutInput(each) if is_frozen(each) else each for each in model))


class Fused(nn.Module):
    """Computes a layer and its activation in one function, without calling them, and recomputes the activation."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first.weight, self.first.bias)
        y = F.gelu(x)
        memory, shape = y.data_ptr(), y.shape

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == memory and tensor.shape == shape else tensor

        def unpack(kept: Tensor | None) -> Tensor:
            return F.gelu(x.detach()) if kept is None else kept

        with saved_tensors_hooks(pack, unpack):
            return F.linear(y, self.second.weight, self.second.bias)


def fused(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(Fused(model[0], model[2]), *model[3:])


def with_new_forward(model: nn.Sequential) -> nn.Module:
    """Return the network with checkpoints in functions that refer to its layers."""
    for each in model:
        if isinstance(each, nn.Linear):
            run = each.forward
            each.forward = lambda x, run=run: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    return model


class NormalizedOncePerVersion(nn.Module):
    """Caches the normalized weight until the optimizer changes the weight."""

    def __init__(self, module: NormalizedLinear) -> None:
        super().__init__()
        self.module, self.version, self.kept = module, -1, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.module.normalized()
        if self.module.weight._version != self.version:
            self.version, self.kept = self.module.weight._version, weight.detach()
        memory = weight.data_ptr()

        def pack(tensor: Tensor) -> Any:
            is_weight = tensor.data_ptr() == memory
            return (tensor.shape, tensor.stride()) if is_weight else tensor

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else kept_weight.as_strided(*kept)

        kept_weight = self.kept
        with saved_tensors_hooks(pack, unpack):
            return F.linear(x, weight, self.module.bias)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), NormalizedLinear(12, 4))


def normalized_once(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*model[:2], NormalizedOncePerVersion(model[2]))


class WithoutDropout(nn.Module):
    """Frees tensors that evaluation does not need."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.module[5] = nn.Identity()
        return self.module(x)


class Flattened(Packed):
    """Returns the outputs in the order of their names, like rebuilding a tree of outputs."""

    def forward(self, *args: Any) -> Any:
        outputs = super().forward(*args)
        return {name: outputs[name] for name in sorted(outputs)}


def flat_gradients(model: nn.Module) -> nn.Module:
    """Return the network with one buffer for all gradients."""
    parameters = list(model.parameters())
    views = torch.zeros(sum(each.numel() for each in parameters)).split([each.numel() for each in parameters])

    def move(view: Tensor, parameter: Tensor) -> None:
        if parameter.grad.data_ptr() != view.data_ptr() and not parameter.grad.requires_grad:
            parameter.grad = view.view_as(parameter).copy_(parameter.grad)

    for parameter, view in zip(parameters, views, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, view=view: move(view, p))
    return model


def annealed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), Annealed(), nn.Linear(12, 4))


def tokens() -> tuple[Tensor]:
    return (torch.tensor([[3, 200], [17, 254], [3, 9], [101, 5]]),)


def images() -> tuple[Tensor]:
    return (pixels(),)


TRICKS: dict[str, Trick] = {
    "saved tensors of the last call alone": Trick(layers, features, LastCall, train_on_two_views),
    "saved tensors of the oldest call first": Trick(layers, features, OldestFirst, skip_step),
    "mode of backward": Trick(layers, features, again_in_mode_of_backward, evaluate_before_backward),
    "autocast of backward": Trick(with_last(), features, again_in_autocast_of_backward, train_under_autocast),
    "gradient over the saved output": Trick(layers, features, replacing(nn.Tanh, TanhInPlace), back_propagate_twice),
    "first derivatives alone": Trick(with_last(), features, replacing(nn.GELU, GeluOfDetached), penalize_gradients),
    "gradients of all outputs": Trick(Heads, features, sharing_input, train_second_output),
    "loss at the end of the graph": Trick(Classifier, labeled, fusing_loss, average_losses),
    "gradient in the memory of the incoming one": Trick(
        with_last(nn.ReLU()), features, replacing(nn.ReLU, ReluInGradient), start_backward_from_gradient
    ),
    "gradient added without autograd": Trick(layers, features, accumulating_into_grad, scale_gradients),
    "input in the memory of the caller": Trick(FromPixels, images, ScaledAgain, refill_buffer_before_backward),
    "output of the same input object": Trick(frozen_stem, features, StemOfInput, train_from_static_buffer),
    "output in the memory of the caller": Trick(
        with_last(nn.LeakyReLU(0.1)), features, replacing(nn.LeakyReLU, LeakyReluOfOutput), subtract_target_in_place
    ),
    "layers frozen when built": Trick(frozen_stem, features, without_inputs_of_frozen, unfreeze),
    "dropout rate when built": Trick(layers, features, masked_with_rate, raise_dropout_rate),
    "hooks added later": Trick(with_last(), features, fused, log_activations),
    "copies that use the original": Trick(with_last(), features, with_new_forward, evaluate_old_copy),
    "weight changed without a version": Trick(normalized, features, normalized_once, minimize_sharpness),
    "statistics in backward": Trick(layers, features, statistics_in_backward, estimate_statistics),
    "dropout freed by evaluation": Trick(layers, features, WithoutDropout, evaluate_between_epochs),
    "calls counted twice": Trick(annealed, features, again_with_counter, train_for_steps),
    "outputs sorted by name": Trick(Losses, features, Flattened, weight_losses),
    "gradients in one buffer": Trick(layers, features, flat_gradients, compare_gradients),
    "tokens in a byte": Trick(Words, tokens, BytesForTokens, train_on_rare_words),
    "large tensors in half precision": Trick(layers, features, BFloat16AboveSize, train_on_large_batch),
    "half precision after twelve calls": Trick(layers, features, BFloat16AfterWarmup, train_for_steps),
    "double precision": Trick(layers, features, SinglePrecision, train_in_double_precision),
}
