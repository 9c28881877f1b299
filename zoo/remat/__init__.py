"""Rematerialization for any network: train in about half the activation memory, bit for bit.

During forward, a dispatch mode records how the outputs of cheap deterministic operations were computed. Where autograd
would save such an output for backward, its recipe (operation and inputs) is saved instead, if the inputs stay alive
anyway or are smaller. Backward recomputes it with the same kernels, so that gradients are bit-identical.

- ``operations``: the rules: which operations may be recomputed, and how each is recomputed exactly.
- ``recipes``: tracked tensors, recipes, and their evaluation in backward.
- ``tracking``: which contents the tensors of a forward pass have, and which memory stays alive until backward.
- ``recording``: how the outputs of operations were computed.
- ``deciding``: whether autograd saves a tensor or its recipe.
- ``frozen``: what is saved for layers whose weights are frozen.
- ``rematerializer``: the dispatch mode that joins these, and the hooks through which autograd saves recipes.
- ``budget``: how much recomputation of convolutions and matrix products is allowed.
- ``planning``: the budget with which the peak of a training step stays within a limit.
- ``lean``: `zoo.lean`, which applies all this to a module.
- ``capture``, ``joint_graph``: the same for graphs that torch.compile captures, without a dispatch mode.
- ``double_backward``: how gradients of the gradients of such a graph are computed.
- ``cut``, ``nodes``, ``autocast``: what such a graph saves, what its nodes are, and how often its inputs are cast.
- ``memory_report``, ``memory_use``: what a network holds between forward and backward.
- ``meta_attention``: attention on the meta device, with the kernels of a real one.

Apart from zoo's errors, tables and internals of torch, and the kernels of ``zoo.ops``, it needs torch alone.
"""

from zoo.remat.capture import inductor_options
from zoo.remat.rematerializer import Rematerializer

__all__ = ["Rematerializer", "inductor_options"]
