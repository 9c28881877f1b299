"""Registers all classification networks with timm when it is imported.

After ``import zoo.registry.timm_models``, ``timm.create_model("zoo_resnet50_iabn")`` is
``zoo.get("resnet50", norm="inplace")``. Each architecture has two names, ``zoo_NAME`` and ``zoo_NAME_iabn`` with
in-place norms; each published network has one, ``zoo_NAME``. The arguments of `timm.create_model` are the arguments of
`zoo.get`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from zoo.config.architectures import ARCHITECTURES
from zoo.config.published import published
from zoo.errors import ConfigError
from zoo.registry.get import get
from zoo.registry.open import find_network, open_network
from zoo.registry.preprocessing import describe_images

try:
    models = import_module("timm.models")
except ImportError as error:
    raise ImportError(
        "zoo.registry.timm_models registers networks with timm, which is missing: pip install timm"
    ) from error


def _entrypoint(registered: str, name: str, fixed: dict[str, Any]) -> Callable[..., Any]:
    def build(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: str | None = None,
        **options: Any,
    ) -> Any:
        """Build the network with `zoo.get` and set the ``pretrained_cfg`` that timm resolves."""
        if cache_dir is not None:
            remedy = "set the environment variable ZOO_CACHE"
            raise ConfigError(f"cache_dir = {cache_dir!r}: weights have one cache", registered, remedy)
        cfg = models.resolve_pretrained_cfg(registered, pretrained_cfg, pretrained_cfg_overlay)
        model = get(name, pretrained=pretrained, **fixed, **options)
        model.pretrained_cfg = {**model.pretrained_cfg, **cfg.to_dict()}
        return model

    build.__name__ = build.__qualname__ = registered
    return build


def _default_cfg(name: str) -> dict[str, Any]:
    """Return timm's ``cfg`` of a network: number of classes, preprocessing, and the address of its weights."""
    record = open_network(name, {}).network
    images = describe_images(record)
    cfg = {key: images[key] for key in ("input_size", "crop_pct", "mean", "std", "interpolation")}
    cfg["num_classes"] = record.spec.num_classes
    if name in published():
        cfg |= {"url": published()[name].page, "license": published()[name].weights.license}
    return cfg


_NAMES: dict[str, tuple[str, dict[str, Any]]] = {}  # name in timm -> name and arguments of `get`
for _name in (*ARCHITECTURES, *published()):
    if ARCHITECTURES[find_network(_name).spec.arch].task == "classification":
        _NAMES[f"zoo_{_name}"] = (_name, {})
        if _name in ARCHITECTURES:
            _NAMES[f"zoo_{_name}_iabn"] = (_name, {"norm": "inplace"})

default_cfgs = models.generate_default_cfgs({key: _default_cfg(name) for key, (name, _) in _NAMES.items()})
for _key, (_name, _fixed) in _NAMES.items():
    models.register_model(_entrypoint(_key, _name, _fixed))
