"""``zoo convert``: KIND SOURCE TARGET --arch NAME."""

import sys

from zoo.cli import main

raise SystemExit(main(["convert", *sys.argv[1:]]))
