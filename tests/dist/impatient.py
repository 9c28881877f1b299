"""``python -m tests.dist.impatient`` is zoo with a limit of a few seconds for lost processes in place of a minute."""

from __future__ import annotations

import sys

from zoo.cli import main
from zoo.engine import heartbeat

heartbeat.BEAT_S, heartbeat.LIMIT_S = 0.5, 8.0

if __name__ == "__main__":
    sys.exit(main())
