"""The networks for torch.hub: ``torch.hub.load("REPOSITORY", "resnet18", num_classes=10)`` calls `zoo.get`.

``torch.hub.list`` returns their names, and ``torch.hub.help`` the arguments of one.
"""

from functools import partial as _partial
from inspect import cleandoc as _cleandoc
from textwrap import fill as _fill

import zoo as _zoo  # torch.hub lists the public callables of this file
from zoo.config.architectures import ARCHITECTURES as _ARCHITECTURES
from zoo.config.describe import describe_options as _describe_options
from zoo.config.published import published as _published

dependencies = ["torch", "torchvision", "numpy", "pydantic", "requests", "gdown", "filelock", "PIL", "tqdm"]


def _help_of(name):
    """Return the help of a network: its options with their defaults, and the arguments of `zoo.get`."""
    published = _published().get(name)
    facts = _ARCHITECTURES[name if published is None else published.arch]
    lines = [f"Return the network {name}, which takes images (N, 3, H, W), {facts.num_classes} classes by default."]
    if published is not None:
        lines += ["", "pretrained=True loads the published weights, which score, in percent:"]
        for protocol, score in published.scores.items():
            lines.append(f"- {protocol}: {', '.join(f'{name} {value}' for name, value in score.items())}")
    lines += ["", "Options of the network:"]
    lines += [
        _fill(f"- {key}: {meaning}", 100, subsequent_indent="  ") for key, meaning in _describe_options(facts).items()
    ]
    return "\n".join([*lines, "", "Other arguments are those of zoo.get:", "", _cleandoc(_zoo.get.__doc__)])


for _name in _zoo.list_models():
    globals()[_name] = _partial(_zoo.get, _name)
    globals()[_name].__doc__ = _help_of(_name)
