"""``zoo benchmark`` for a checkout."""

import sys

from zoo.cli import main

raise SystemExit(main(["benchmark", *sys.argv[1:]]))
