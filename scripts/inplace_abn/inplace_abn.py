"""Stands for zoo.inplace_abn under the name inplace_abn: ``import inplace_abn`` and its submodules are that package."""

import sys

del sys.modules[__name__]  # zoo.inplace_abn takes this name, unless another module has it
import zoo.inplace_abn  # noqa: E402, F401
