"""The tiny finished run of the command line's tests."""

from tests.cli.conftest import finished

__all__ = ["finished"]
