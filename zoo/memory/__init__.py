"""The proof and the bytes: `zoo.check`, `zoo.memory_report`, and what they measure.

- ``check``: `zoo.check` trains copies of a network in each of the ``scenarios``, and compares all ``values``.
  ``containers`` finds them in what a network returns, and ``places`` finds the operation whose values differ first.
- ``report``: `zoo.memory_report`. ``held`` tells what each module holds for backward, ``fit`` answers what fits into a
  limit, and ``plot`` draws the memory of a step.
- ``trial``: training steps on copies of a network. ``allocations`` counts their bytes and ``timing`` their time.
- ``release``: `zoo.release_gradients` frees gradients inside backward.
- ``block_checkpointing``: activation checkpointing of blocks, for comparison.
"""
