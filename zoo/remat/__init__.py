"""Rematerialization for any network: train in about half the activation memory, bit for bit.

During forward, a dispatch mode records how the outputs of cheap deterministic operations were computed. Where autograd
would save such an output for backward, its recipe (operation and inputs) is saved instead, if the inputs stay alive
anyway or are not larger. Backward recomputes it with the same kernels, so that gradients are bit-identical.

- ``lean``: `zoo.lean`, which runs the calls of a module in a rematerializer.
- ``rematerializer``: the dispatch mode, with the hooks through which autograd saves recipes. ``tracking`` knows the
  contents of the tensors of a forward pass, ``recording`` how outputs were computed, and ``deciding`` whether autograd
  saves a tensor or its recipe. ``frozen`` saves less for layers whose weights are frozen.
- ``recipes``: tracked tensors, recipes, and their evaluation in backward.
- ``rules``: which operations may be recomputed. ``exact_norms`` recomputes norms exactly, ``bits`` stores masks, and
  ``cost`` tells which operations take long.
- ``limit``: plans the passes. ``record`` records the first forward pass of a kind as a graph, ``plan`` finds what to
  save, recompute and free, and ``follow`` does that in later passes. ``budget`` is a limit on memory, up to which
  convolutions and matrix products are recomputed, too. ``step_log`` measures a step.
- ``inductor/``: the same choice for `torch.compile`. ``cut`` chooses what a forward graph saves, ``partition`` rewrites
  backward, and ``nodes`` describes the graph.

Apart from zoo's errors, tables and internals of torch, and the kernels of ``zoo.ops``, it needs torch alone.
"""

from zoo.remat.inductor.partition import inductor_options
from zoo.remat.rematerializer import Rematerializer

__all__ = ["Rematerializer", "inductor_options"]
