"""``zoo quickstart`` for a checkout that is not installed."""

import sys

from zoo.cli import main

raise SystemExit(main(["quickstart", *sys.argv[1:]]))
