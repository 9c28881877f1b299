"""Rematerialization for any network: train in about half the activation memory, bit for bit.

During forward, a dispatch mode records how the outputs of cheap deterministic operations were computed. Where autograd
would save such an output for backward, its recipe (operation and inputs) is saved instead, if the inputs stay alive
anyway or are not larger. Backward recomputes it with the same kernels, so that gradients are bit-identical.

- ``_lean``: `zoo.lean`, which runs the calls of a module in a rematerializer.
- ``_rematerializer``: the dispatch mode, and the hooks by which autograd saves recipes. ``_tracking`` tracks the
  contents of tensors in a forward pass, ``_recording`` records recipes, and ``_deciding`` chooses between a tensor and
  its recipe. ``_frozen`` saves less for layers with frozen weights.
- ``_recipes``: tracked tensors, recipes, and their evaluation in backward.
- ``_rules``: the operations that may be recomputed. ``_exact_norms`` recomputes norms exactly, ``_bits`` packs masks,
  and ``_cost`` counts FLOP.
- ``_limit``: plans the passes. ``_record`` records the first forward pass of a kind as a graph, ``_plan`` decides what
  to save, recompute and free, and ``_follow`` applies the plan in later passes. ``_budget`` is a limit on memory,
  within which convolutions and matrix products are recomputed too. ``_step_log`` measures a step.
- ``inductor/``: the same decision for `torch.compile`. ``_cut`` chooses what a forward graph saves, ``_partition``
  rewrites backward, and ``_nodes`` describes the graph.

It needs only torch, and from zoo: errors, tables, internals of torch, and the kernels of ``zoo.ops``.
"""

from zoo.remat._rematerializer import Rematerializer
from zoo.remat.inductor._partition import inductor_options

__all__ = ["Rematerializer", "inductor_options"]
