"""``zoo reproduce`` for a checkout that is not installed, and for torchrun."""

import sys

from zoo.cli import main

raise SystemExit(main(["reproduce", *sys.argv[1:]]))
