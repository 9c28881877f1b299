"""``zoo test-imagenet`` under the original project's name: CONFIG CHECKPOINT DATA, also for launchers."""

import sys

from zoo.cli import main

raise SystemExit(main(["test-imagenet", *sys.argv[1:]]))
