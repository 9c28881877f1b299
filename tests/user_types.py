"""What a user's type checker sees of the package; no test: mypy reads it in `make lint`.

The types are those that the package declares, and not Any. An error that goes away is an unused `type: ignore`.
"""

# mypy: disallow-any-generics, disallow-untyped-calls, disallow-untyped-decorators, disallow-any-unimported
# mypy: disallow-subclassing-any, warn-return-any, strict-equality, extra-checks

from __future__ import annotations

from typing_extensions import assert_type

import zoo
from zoo.layers import InPlaceABN
from zoo.models.base import Network

model = zoo.get("resnet50", norm="inplace", num_classes=10, in_chans=1, features_only=False)
assert_type(model, Network)
assert_type(zoo.__version__, str)
names: list[str] = zoo.list_models(["resnet*"])
norm = InPlaceABN(16, activation="elu")
zoo.get("resnet50", True)  # type: ignore[call-arg]
zoo.get("resnet50", num_classes="10")  # type: ignore[arg-type]
