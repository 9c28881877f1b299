"""Recipes in place of saved tensors: any network trains in about half the memory, with the same bits.

While a network runs forward, the outputs of cheap deterministic operations are remembered as recipes: which operation
made them, of what. Where autograd would keep such an output for the backward pass, its recipe is kept instead, if all
that the recipe starts from is kept anyway or is smaller. Backward follows a recipe with the kernels of the forward
pass, so that gradients are the same bits.

- ``operations``: which operations may be repeated, and how each is repeated exactly.
- ``recipes``: the graph of values and calls, and how a value is computed again.
- ``fusing``: norms and activations as one operation, for those who do not need the same bits.
- ``recording``: what watches a forward pass and decides what is kept.
"""

from zoo.remat.recording import Recording

__all__ = ["Recording"]
