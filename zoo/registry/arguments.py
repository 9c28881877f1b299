"""The keyword arguments of `zoo.get`: build options and changes to the spec. Does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from zoo.config.architectures import ARCHITECTURES, Architecture, which_have
from zoo.config.limits import MAX_CHANNELS
from zoo.config.network import NetworkSpec
from zoo.config.section import Section, parse_section
from zoo.errors import ConfigError, escape, join_names, shorten_repr


class BuildOptions(Section):
    """The arguments of `zoo.get` that are not part of the spec."""

    pretrained: bool = False
    """Load the published weights."""
    features_only: bool = False
    """Omit the classifier; forward returns the list of the stages' outputs."""
    out_indices: Annotated[Sequence[int | str], Field(min_length=1, max_length=100)] | None = None
    """Stages that forward returns, finest first; later stages do not run. "stem" is the input of the stem's pool."""
    in_chans: Annotated[int, Field(ge=1, le=MAX_CHANNELS)] = 3
    """Number of image channels; `zoo.weights._load.fit_input` adapts weights."""
    drop_rate: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    """Dropout rate before the classifier."""
    global_pool: str | None = None
    """Pooling before the classifier, see `zoo.models.base.Network.reset_classifier`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if stages are selected without ``features_only``."""
        if self.out_indices is not None and not self.features_only:
            yield "out_indices", "requires features_only=True"


def split_arguments(name: str, arguments: Mapping[str, Any]) -> tuple[BuildOptions, dict[str, Any]]:
    """Split the arguments of `zoo.get` into build options and changes to the spec.

    Raises ConfigError, with the ``name`` of the network, for wrong values and for arguments that exclude each other.
    """
    how = {key: value for key in BuildOptions.model_fields if (value := arguments.get(key)) is not None}
    changes = {key: value for key, value in arguments.items() if key not in BuildOptions.model_fields}
    for key in ("activation", "activation_param"):
        if callable(changes.get("norm")) and changes.get(key) is not None:
            raise ConfigError("a norm function includes the activation", f"{name}: {key}", "omit the argument")
    if how.get("features_only") and changes.get("num_classes"):
        raise ConfigError("features_only=True builds no classifier", f"{name}: num_classes", "omit the argument")
    return parse_section(BuildOptions, how, escape(name)), changes


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def changes_of(arch: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to changes of the spec. Arguments that are None are dropped.

    ``output_stride`` becomes the option ``dilation``. Raises TypeError for names that neither `zoo.get` nor the
    architecture knows, and ConfigError for a stride that the architecture does not support.
    """
    changes = _given(arguments)
    if arch not in ARCHITECTURES:
        return changes  # an external network, whose package checks its options
    facts = ARCHITECTURES[arch]
    options = [*facts.options.model_fields, "memory"]
    fields = [key for key in NetworkSpec.model_fields if key not in ("arch", "options")]
    known = [*fields, "output_stride", *options]
    if unknown := [argument for argument in arguments if argument not in known]:
        near = difflib.get_close_matches(unknown[0], [*known, *BuildOptions.model_fields, "weights", "body_weights"], 1)
        raise TypeError(
            f"get() got an unexpected keyword argument {unknown[0]!r} for {arch}, whose options are "
            f"{join_names(options)}{which_have(unknown[0])}"
            + "".join(f"; the nearest argument is {name!r}" for name in near)
        )
    if "output_stride" not in facts.options.model_fields:
        dilation = _choose_dilation(facts, changes.pop("output_stride", None), changes.get("dilation"))
        changes |= {} if dilation is None else {"dilation": dilation}
    return changes


def _choose_dilation(arch: Architecture, output_stride: int | None, dilation: Any) -> Any:
    """Return the value of ``dilation`` that gives the last map this stride; ``dilation`` itself if the stride is None.

    Raises ConfigError if both are given, and for a stride that the architecture does not support.
    """
    if output_stride is None:
        return dilation
    if dilation is not None:
        raise ConfigError(f"{arch.name}: output_stride sets dilation; pass one of them")
    if not arch.dilations:
        raise ConfigError(
            f"{arch.name}: output_stride: the network cannot be dilated, so its stride is fixed{which_have('dilation')}"
        )
    if output_stride not in list(arch.dilations):  # the value may be unhashable
        strides = join_names(sorted(arch.dilations))
        raise ConfigError(f"{arch.name}: output_stride = {shorten_repr(output_stride)}: should be one of {strides}")
    return arch.dilations[output_stride]
