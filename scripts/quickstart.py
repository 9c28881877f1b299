"""``zoo quickstart`` for a checkout."""

import sys

from zoo.cli import main

raise SystemExit(main(["quickstart", *sys.argv[1:]]))
