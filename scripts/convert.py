"""``zoo convert`` for a checkout that is not installed: KIND SOURCE TARGET."""

import sys

from zoo.cli import main

raise SystemExit(main(["convert", *sys.argv[1:]]))
