"""``zoo benchmark`` for a checkout that is not installed."""

import sys

from zoo.cli import main

raise SystemExit(main(["benchmark", *sys.argv[1:]]))
