"""The finished run of the command line's tests, and the fixture that runs commands."""

from tests.cli.conftest import cli, finished

__all__ = ["cli", "finished"]
