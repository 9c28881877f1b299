"""``zoo reproduce`` for a checkout that is not installed, and for torch.distributed.launch and torchrun."""

import sys

from zoo.cli import main

# torch.distributed.launch puts --local-rank first; it is an option of the benchmark, which has to precede it.
launcher = [word for word in sys.argv[1:2] if word.startswith("--local")]
raise SystemExit(main(["reproduce", *sys.argv[1 + len(launcher) :], *launcher]))
