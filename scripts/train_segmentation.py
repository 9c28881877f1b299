"""``zoo train`` for segmentation: CONFIG DATA, also for torchrun."""

import sys

from zoo.cli import main

raise SystemExit(main(["train", *sys.argv[1:]]))
