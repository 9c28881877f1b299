"""The build steps that pyproject.toml cannot express: packing experiments and checksums, compiling the CPU kernels.

The kernels need torch's headers and a C++ compiler. Without either the package is installed all the same: it then
computes with plain torch, and says why. One build serves every Python and torch of pyproject.toml, and later ones.
With ZOO_PURE_WHEEL=1 the kernels are left out, and the wheel is for every machine.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = ["abn.cpp", "batch_norm.cpp", "grid.cpp", "kernels_full.cpp", "kernels_half.cpp", "pool.cpp", "resample.cpp"]
# Torch is built with the first two flags too. Without them compilers do not vectorize code that selects values.
FLAGS = ["-fno-trapping-math", "-fno-math-errno", "-fopenmp-simd", "-O3", "-std=c++17", "-fvisibility=hidden", "-g0"]
OLDEST_TORCH = "0x020b000000000000"  # 2.11


class BuildWithExperiments(build_py):
    """Copies zoo/experiments and zoo/checksums.md5; an editable install reads them from the checkout instead."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib, "zoo")
            shutil.copytree(
                "experiments", package / "experiments", ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True
            )
            shutil.copy("checksums.md5", package)


class BuildIfPossible(build_ext):
    """Compiles the kernels, one source file per core; if that fails, warns and installs the package without them."""

    def build_extension(self, extension: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], *args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: compile_files([source], *args, **options), sources))
            return [path for paths in objects for path in paths]

        self.compiler.compile = compile_in_parallel
        try:
            super().build_extension(extension)
        except Exception as error:
            self.warn(f"the CPU kernels are left out, plain torch stands in: {error}")
            self.extensions.remove(extension)


def kernels() -> list[Extension]:
    """Return the extension with the CPU kernels; none without torch, which is never downloaded for the build."""
    if os.environ.get("ZOO_PURE_WHEEL") == "1":
        return []
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        print("the CPU kernels are left out: there is no torch to build against (use --no-build-isolation)")
        return []
    torch = Path(spec.submodule_search_locations[0])
    return [
        Extension(
            "zoo.ops._native",
            sources=[f"csrc/{name}" for name in SOURCES],
            depends=["csrc/kernels.h", "csrc/kernels-inl.h", "csrc/numbers.h", "csrc/tensors.h"],
            include_dirs=[str(torch / "include")],
            library_dirs=[str(torch / "lib")],
            libraries=["torch_cpu"],
            define_macros=[("TORCH_TARGET_VERSION", OLDEST_TORCH)],
            extra_compile_args=FLAGS,
            py_limited_api=True,
        )
    ]


extensions = kernels()
setup(
    cmdclass={"build_py": BuildWithExperiments, "build_ext": BuildIfPossible},
    ext_modules=extensions,
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if extensions else {},
)
