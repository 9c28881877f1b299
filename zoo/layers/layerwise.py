"""What networks of layer-wise invertible layers have beside the layers: reversible blocks of them, and both ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.invertible import Coupling, Invertible
from zoo.layers.recompute import paused_statistics
from zoo.ops.invertible import convolve, convolve_gradients, halves, largest, largest_gradient
from zoo.ops.reversible import Gradients, add_gradients


class LayerwiseBlock(Coupling):
    """Reversible block of layer-wise branches f and g.

    ``f`` and ``g`` are the layers of the branches, each of which keeps the shape.  Undoing the block runs a branch
    forward, subtracts what comes out, and undoes the branch layer by layer, so that inside a branch only the running
    map and its gradient exist.

    ``keep_input`` says what happens to the input of a branch, which is half of the map.  True: the branch runs in a
    copy, and the input stays exact, so that errors inside a branch never leave the block; this is the paper's block
    and that of the authors' code.  False: the branch runs in the memory of its own input, and undoing it brings the
    input back, as precisely as the branch alone can be undone; a step then takes half of the map less.

    Source: Hascoet et al. 2023, section 4.4.
    """

    def __init__(self, f: Sequence[Invertible], g: Sequence[Invertible], *, keep_input: bool = True) -> None:
        super().__init__()
        self.f = nn.Sequential(*f)
        self.g = nn.Sequential(*g)
        self.keep_input = keep_input

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of x, and nothing."""
        x1, x2 = halves(x)
        for source, branch, target in ((x2, self.f, x1), (x1, self.g, x2)):
            target.add_(_record_(branch, source.clone(memory_format=torch.contiguous_format))[0])
        return x, None

    def undo_(self, y: Tensor, dy: Tensor, kept: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and the gradients of the parameters; counts no batch."""
        (y1, y2), (dy1, dy2) = halves(y), halves(dy)
        with paused_statistics(self):
            gradients = _subtract_(self.g, y1, y2, dy1, dy2, self.keep_input)
            add_gradients(gradients, _subtract_(self.f, y2, y1, dy2, dy1, self.keep_input))
        return y, dy, gradients


def _record_(layers: Iterable[Any], x: Tensor) -> tuple[Tensor, list[Any]]:
    """Return the layers' output in the memory of x, and what each keeps."""
    kept = []
    for layer in layers:
        x, own = layer.record_(x)
        kept.append(own)
    return x, kept


def _subtract_(
    branch: nn.Sequential, source: Tensor, target: Tensor, dsource: Tensor, dtarget: Tensor, keep_source: bool
) -> Gradients:
    """Take ``branch(source)`` from target, add to dsource what came through it; return the parameters' gradients.

    With ``keep_source`` the source stays as it is; otherwise it is overwritten, and found again at the end.
    """
    start = source.clone(memory_format=torch.contiguous_format) if keep_source else source
    z, kept = _record_(branch, start)
    target.sub_(z)
    dz = dtarget.clone(memory_format=torch.contiguous_format)
    gradients: Gradients = {}
    for layer, own in zip(reversed(list(branch)), reversed(kept), strict=True):
        z, dz, found = layer.undo_(z, dz, own)  # type: ignore[operator]
        add_gradients(gradients, found)
    dsource.add_(dz)
    return gradients


class Stem(Invertible):
    """The first convolution, which is not undone: its input, the images, is there anyway."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv2d(3, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of the images, at least in float32: all that follows adds to it."""
        return self.conv(x).to(torch.promote_types(x.dtype, torch.float32))

    def record(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, int]]:
        """Return the convolution, at least in float32, and the images with their version."""
        return convolve(x, self.conv), (x, x._version)

    def reverse(
        self, y: Tensor, dy: Tensor, owned: bool, kept: tuple[Tensor, int]
    ) -> tuple[Tensor, Tensor | None, Gradients]:
        """Return the images, their gradient if they need one, and that of the kernel.

        RuntimeError if the images have been overwritten since.
        """
        x, version = kept
        if x._version != version:
            raise RuntimeError(
                f"the images of shape {tuple(x.shape)} have been overwritten between the forward pass of an "
                "invertible network and its backward pass, which needs them; give it a copy"
            )
        dx, dkernel = convolve_gradients(x, dy, self.conv)
        return x, dx, {self.conv.weight: dkernel}


class GlobalMax(Invertible):
    """The largest value of each channel, over the map and the ``images`` that batch pools made of one: -> (N, C).

    The map is kept, and handed on to the layers before, which overwrite it: backward through it can be run once.
    """

    def __init__(self, images: int = 1) -> None:
        super().__init__()
        self.images = images

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (N, C)."""
        return largest(x, self.images)

    def record(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features, and the map."""
        return self(x), [x]

    def reverse(self, y: Tensor, dy: Tensor, owned: bool, kept: list[Tensor]) -> tuple[Tensor, Tensor, Gradients]:
        """Return the map and its gradient; RuntimeError the second time."""
        if not kept:
            raise RuntimeError("backward through an invertible network can be run once: it overwrites what it keeps")
        x = kept.pop()
        return x, largest_gradient(x, y, dy, self.images), {}
