"""``zoo test-vistas`` under the original project's name: SNAPSHOT IN_DIR OUT_DIR, also for launchers."""

import sys

from zoo.cli import main

raise SystemExit(main(["test-vistas", *sys.argv[1:]]))
