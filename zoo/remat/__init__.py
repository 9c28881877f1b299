"""Rematerialization for any network: train in about half the activation memory, bit for bit.

During forward, a dispatch mode records how the outputs of cheap deterministic operations were computed. Where autograd
would save such an output for backward, its recipe (operation and inputs) is saved instead, if the inputs stay alive
anyway or are not larger. Backward recomputes it with the same kernels, so that gradients are bit-identical.

- ``lean``: `zoo.lean`, which runs the calls of a module in a rematerializer.
- ``rematerializer``: the dispatch mode, and the hooks by which autograd saves recipes. ``tracking`` tracks the contents
  of tensors in a forward pass, ``recording`` records recipes, and ``deciding`` chooses between a tensor and its recipe.
  ``frozen`` saves less for layers with frozen weights.
- ``recipes``: tracked tensors, recipes, and their evaluation in backward.
- ``rules``: the operations that may be recomputed. ``exact_norms`` recomputes norms exactly, ``bits`` packs masks, and
  ``cost`` counts FLOP.
- ``limit``: plans the passes. ``record`` records the first forward pass of a kind as a graph, ``plan`` decides what to
  save, recompute and free, and ``follow`` applies the plan in later passes. ``budget`` is a limit on memory, within
  which convolutions and matrix products are recomputed too. ``step_log`` measures a step.
- ``inductor/``: the same decision for `torch.compile`. ``cut`` chooses what a forward graph saves, ``partition``
  rewrites backward, and ``nodes`` describes the graph.

It needs only torch, and from zoo: errors, tables, internals of torch, and the kernels of ``zoo.ops``.
"""

from zoo.remat.inductor.partition import inductor_options
from zoo.remat.rematerializer import Rematerializer

__all__ = ["Rematerializer", "inductor_options"]
