"""Packages experiments/ beside the code, so that an installed zoo can run them; the rest is pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExperiments(build_py):
    """Adds the experiment files as zoo/experiments; an editable install reads them from the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "zoo", "experiments")
            shutil.copytree("experiments", target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithExperiments})
