"""Small networks, their held bytes, and programs of tensor operations that run with and without recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.memory.allocations import measure_memory
from zoo.memory.held import HeldLog
from zoo.remat import Rematerializer

#: The marks of tests that compile. The warnings are torch's own.
COMPILES = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_graphs"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning"),  # torch 2.11's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # after a graph break
]


class Block(nn.Module):
    """A residual block as torchvision writes it: two convolutions with norms, and ReLUs in place."""

    def __init__(self, channels: int, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(norm(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.first(x)))
        return self.relu(self.norms[1](self.second(y)) + x)


def network(blocks: int = 3, channels: int = 8) -> nn.Module:
    """Return a small residual network with the same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, padding=1), *(Block(channels) for _ in range(blocks))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


class FrozenBody(nn.Module):
    """A trained stem and head, and between them a frozen body in evaluation mode."""

    def __init__(self, has_frozen_norms: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)).requires_grad_(False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4)).requires_grad_(not has_frozen_norms).eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu_(norm(conv(x)) + x)
        return self.head(F.avg_pool2d(F.relu(F.max_pool2d(x, 2)), 2))


def images(size: int = 12, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 3, size, size, **options)


class Recorded(nn.Module):
    """Runs a module in a `Rematerializer` that recomputes small tensors too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        with Rematerializer(smallest_bytes=0):
            return self.module(x)


class Checkpointed(nn.Module):
    """Runs a module in a checkpoint of torch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=False)


def held(module: nn.Module, *inputs: Any) -> int:
    """Return the bytes that a training step holds between forward and backward."""
    return measure_memory(lambda: module(*inputs).square().mean(), module.parameters()).held


def peak(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of parameters, buffers, the input and a training step at its peak, including its output."""
    existing = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), x))

    def forward() -> Tensor:
        forward.output = None  # the allocator's log might take a block that is freed later for one of this step
        output = model(x)
        forward.output = output
        return F.cross_entropy(output, torch.zeros_like(output[:, 0], dtype=torch.long))

    return existing + measure_memory(forward, model.parameters()).peak


def gradients(*modules: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [each.grad for module in modules for each in module.parameters() if each.grad is not None]


def assert_same_step(module: nn.Module, plain: nn.Module, *inputs: Any) -> None:
    """Assert that a training step of two modules has the same output and gradients, bit for bit."""
    results = []
    for each in (module, plain):
        torch.manual_seed(1)
        each.zero_grad()
        output = each(*inputs)
        output.float().square().mean().backward()
        results.append([output.detach(), *gradients(each)])
    assert are_equal(*results)


def bytes_held(forward: Callable[[], object], *modules: nn.Module) -> int:
    """Return the bytes that backward of a lean forward pass holds, without the memory of the modules."""
    log = HeldLog()
    own = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    with log.record(smallest_bytes=0, parameters=own):
        forward()
    return sum(each.lean for each in log.memory())


class Layers(nn.Module):
    """A function of an input and layers."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


class Scalar(Layers):
    """A function of an input and layers, whose mean square is the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def gradients_of(
    program: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    with_recipes: bool,
    log: HeldLog | None = None,
    num_passes: int = 1,
    **options: Any,
) -> list[Tensor]:
    """Return a program's output, and its gradients by fresh copies of the ``inputs`` that are of a floating type.

    They are of the last of several equal passes: the first one is recorded, and later ones follow a plan.
    """
    options = {"smallest_bytes": 0, **options}
    context: AbstractContextManager[Any] = Rematerializer(**options) if with_recipes else nullcontext()
    for _ in range(num_passes):
        torch.manual_seed(0)
        leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
        with context if log is None else log.record(**options):
            out = program(*leaves)
        before = out.detach().clone()
        out.float().square().sum().backward()
    return [before, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def are_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Return whether the tensors of two lists are equal; ValueError for lists of different lengths."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_same(program: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> None:
    """Assert that two passes of a program are bit-identical to the program without recipes.

    With a log, only the pass that it records runs.
    """
    expected = gradients_of(program, inputs, with_recipes=False)
    for num_passes in (1,) if "log" in options else (1, 2):
        found = gradients_of(program, inputs, with_recipes=True, num_passes=num_passes, **options)
        assert are_equal(found, expected)


def runs(program: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether torch has the operations of a program for the dtype, layout and size of its inputs."""
    try:
        gradients_of(program, inputs, with_recipes=False)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


class Branched(nn.Module):
    """A U-Net: features of encoder and decoder are concatenated."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        sizes = [(3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)]
        self.down = nn.ModuleList(self._block(*each) for each in sizes)
        self.up = nn.ModuleList(self._block(6 * channels // part, 2 * channels // part) for part in (1, 2))
        self.head = nn.Conv2d(channels, 2, 1)

    def _block(self, inputs: int, outputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.01), nn.Conv2d(outputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat((F.interpolate(x, scale_factor=2), skips.pop()), 1))
        return self.head(x)


class SquaredReLU(nn.Module):
    """A block of a residual network of tokens, with the square of a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.second = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))).square())


class Recurrent(nn.Module):
    """A cell of an LSTM, applied step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros_like(x)
        for _ in range(5):
            hidden, cell = self.cell(x, (hidden, cell))
        return self.head(hidden)


def _convolutions() -> nn.Module:
    pairs = [(3, 8), (8, 8), (8, 16), (16, 16)]
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairs):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if index % 2 else []
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(16 * 12 * 12, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 5)
    )


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


#: Name -> a small network whose tensors are large enough to recompute, and its input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (lambda: network(channels=8), lambda: images(48)),
    "encoder": (_encoder, lambda: torch.randn(4, 80, 64)),
    "squared relu": (lambda: nn.Sequential(*(SquaredReLU(64) for _ in range(3))), lambda: torch.randn(4, 80, 64)),
    "convolutions": (_convolutions, lambda: images(48)),
    "branched": (Branched, lambda: images(64)),
    "recurrent": (lambda: Recurrent(64), lambda: torch.randn(300, 64)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network of `NETWORKS` and its input, the same each time."""
    module, x = NETWORKS[name]
    torch.manual_seed(0)
    return module(), x()


def state_of(module: nn.Module) -> list[Tensor]:
    """Return copies of the parameters, their gradients and the buffers."""
    return [each.detach().clone() for each in (*module.parameters(), *gradients(module), *module.buffers())]


def train_steps(
    module: nn.Module, run: Callable[[int], Tensor], num_steps: int = 4, is_accumulating: bool = False
) -> list[Tensor]:
    """Return the outputs of training steps with momentum, and the state of the module after them.

    Args:
    - `run`: returns the output of a step, by its number.
    - `is_accumulating`: whether each step has two forward and backward passes.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    outputs = []
    for number in range(num_steps):
        optimizer.zero_grad()
        for part in range(1 + is_accumulating):
            torch.manual_seed(2 * number + part)
            output = run(number)
            outputs.append(output.detach().clone())
            output.float().square().mean().backward()
        optimizer.step()
    return [*outputs, *state_of(module)]
