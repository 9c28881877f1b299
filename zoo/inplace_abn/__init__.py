"""The names of the package inplace_abn (mapillary, releases 0.x to 1.1.0), implemented by `zoo.layers`.

Importing this package also makes it and its modules importable as ``inplace_abn``, so that code for the original then
runs unedited:

    import zoo.inplace_abn
    from inplace_abn import InPlaceABN

Import it first: packages such as timm look for inplace_abn when they are imported. Raises ImportError if the original
is imported already. `replace_copy` also replaces a copy of the original in another repository.
"""

import sys

from zoo.inplace_abn import abn, bn, functions, group
from zoo.inplace_abn.abn import ABN, InPlaceABN, InPlaceABNSync
from zoo.inplace_abn.copies import replace_copy
from zoo.inplace_abn.functions import inplace_abn, inplace_abn_sync
from zoo.inplace_abn.group import active_group, set_active_group

__all__ = [
    "ABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "active_group",
    "inplace_abn",
    "inplace_abn_sync",
    "replace_copy",
    "set_active_group",
]

__version__ = "1.1.0"  # the last release of the original; this package has its interface

_this = sys.modules[__name__]
if sys.modules.get("inplace_abn", _this) is not _this:
    raise ImportError(
        f"another inplace_abn is imported already, from {getattr(sys.modules['inplace_abn'], '__file__', None)}; "
        "import zoo.inplace_abn before everything that imports inplace_abn"
    )
sys.modules["inplace_abn"] = _this
for _module in (abn, bn, functions, group):
    sys.modules[_module.__name__.removeprefix("zoo.")] = _module
