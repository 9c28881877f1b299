"""The networks for torch.hub: ``torch.hub.load("REPOSITORY", "resnet18", num_classes=10)`` calls `zoo.get`."""

from functools import partial as _partial

import zoo as _zoo  # torch.hub lists the public callables of this file

dependencies = ["torch", "torchvision", "numpy", "pydantic", "requests", "PIL", "tqdm"]

for _name in _zoo.list_models():
    globals()[_name] = _partial(_zoo.get, _name)
    globals()[_name].__doc__ = f"Return the network {_name!r}; the keyword arguments are those of zoo.get."
