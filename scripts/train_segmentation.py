"""``zoo train`` for segmentation: CONFIG DATA, also for torch.distributed.launch and torchrun."""

import sys

from zoo.cli import main

raise SystemExit(main(["train", *sys.argv[1:]]))
