"""Loads a complete state dict into a network, or raises an error that names every difference."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zoo.errors import WeightsError, join_names
from zoo.layers.norm import InPlaceABN
from zoo.models import Network
from zoo.tables import counted

logger = logging.getLogger("zoo")


COUNTER = "num_batches_tracked"
MAX_KEYS = 5  # keys that a message names per kind of difference
PLAIN_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
PLAIN_DTYPES |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
ClassifierOutcome = Literal["loaded", "dropped", "kept", "none"]


@dataclass(frozen=True)
class LoadReport:
    """What `load_state_dict` did. Surprising outcomes are also logged.

    Args:
    - `source`: name of the file in messages.
    - `num_loaded`: number of loaded tensors.
    - `classifier`: "loaded"; "dropped" if the network has no classifier; "kept" if the network keeps its own because
      the number of classes differs; "none" if neither has one.
    - `initial`: modules without tensors in the file, which keep their initial values: head and cls of a DeepLab whose
      body got the weights of a classification network.
    """

    source: str
    num_loaded: int
    classifier: ClassifierOutcome
    initial: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{counted(self.num_loaded, 'tensor')} loaded from {self.source}"


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor], *, source: str) -> LoadReport:
    """Copy ``state_dict`` into ``model`` and return a report; ``source`` names the file in messages.

    Missing batch counters become 0. The classifier of the file is not loaded if the model has none, or if the numbers
    of classes differ; this is logged. Negative scales of in-place norms are logged, too.

    Raises WeightsError and leaves the model unchanged if another key is missing or unexpected, if a shape differs or a
    dtype is incompatible, or if a tensor is sparse, quantized or nested.
    """
    model_state = model.state_dict()
    state_dict = _checked(model, state_dict, source)
    used, complete, classifier = _matched(model, model_state, state_dict, source)
    # Everything that can fail comes before the first change to the network.
    file_state = {key: tensor.to(model_state[key].dtype) for key, tensor in used.items()}
    model.load_state_dict(complete | file_state)
    report = LoadReport(source, len(file_state), classifier)
    network = _family_of(model)
    log_classifier(report, count_outputs(state_dict, network, source), count_outputs(model_state, network, source))
    _warn_of_negative_scales(model, file_state, source)
    return report


def check_fits(model: nn.Module, state_dict: Mapping[str, Tensor], *, source: str) -> None:
    """Raise the WeightsError that `load_state_dict` would raise; ``model`` may be on the meta device."""
    _matched(model, model.state_dict(), _checked(model, state_dict, source), source)


def fit_input(state_dict: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Adapt the filters of the first convolution in a state dict to the network's input channels.

    For one channel, the filters of red, green and blue are summed, so that a gray image gives the same output as three
    equal channels. For other numbers of channels they are repeated and scaled by 3 / channels, which preserves the sum
    over equal channels. Returns the state dict itself if it needs no change.
    """
    in_chans = model.in_chans if isinstance(model, Network) else 3
    key = model.input_weight() if isinstance(model, Network) and in_chans != 3 else None
    weight = None if key is None else state_dict.get(key)
    if key is None or weight is None or weight.ndim != 4 or weight.shape[1] != 3:
        return state_dict
    if in_chans == 1:
        fitted = weight.sum(1, keepdim=True)
    else:
        fitted = weight.repeat(1, -(-in_chans // 3), 1, 1)[:, :in_chans] * (3 / in_chans)
    return {**state_dict, key: fitted.to(weight.dtype)}


def is_segmentation(keys: Iterable[str]) -> bool:
    """Return whether the keys belong to a segmentation network, with a body and a head."""
    # Ignores batch counters: the caller may have filled them in from the network.
    return {"body", "head"} <= {key.partition(".")[0] for key in keys if not key.endswith(COUNTER)}


def count_outputs(state_dict: Mapping[str, Tensor], network: type[Network], source: str) -> int:
    """Return the number of outputs of the classifier in a state dict of a family; 0 if there is none.

    Raises WeightsError, naming ``source``, for a weight without dimensions.
    """
    return num_rows(network.rename_keys(state_dict), f"{network.linear_name}.weight", source)


def num_rows(state_dict: Mapping[str, Tensor], key: str, source: str) -> int:
    """Return the number of outputs of the layer with the weight ``key``; 0 if there is none. Raises WeightsError."""
    weight = state_dict.get(key)
    if weight is not None and weight.ndim == 0:
        what = f"{key} is a single number, but the weight of a classifier has the shape (classes, features)"
        raise WeightsError(what, source, "ask who made the file, or save it again")
    return 0 if weight is None else len(weight)


def _family_of(model: nn.Module) -> type[Network]:
    """Return the class that knows the keys of the classifier; `Network` for users' modules."""
    return type(model) if isinstance(model, Network) else Network


def _checked(model: nn.Module, state_dict: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
    """Rename the keys of a file to those of the model's class. Raises WeightsError for unsupported tensors."""
    _refuse_odd_tensors(state_dict, source)
    return _family_of(model).rename_keys(state_dict)


def _matched(
    model: nn.Module, model_state: Mapping[str, Tensor], state_dict: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], ClassifierOutcome]:
    """Match a file's state dict with ``model_state``, the state dict of ``model``.

    Returns the tensors of the file that are used; the same tensors, completed with the network's own tensors and with
    counters of 0; and ``classifier`` of `LoadReport`. Raises WeightsError for differences.
    """
    state_dict = fit_input(state_dict, model)
    network = _family_of(model)
    root = network.classifier_name.partition(".")[0]
    # A backbone may lack the whole head that contains the classifier.
    has_root = any(key.startswith(f"{root}.") for key in model_state)
    prefix = f"{network.classifier_name if has_root else root}."
    classifier = _compare_classifiers(state_dict, model_state, prefix, network.linear_name)
    unused = () if classifier in ("loaded", "none") else (prefix,)
    file_state = {key: tensor for key, tensor in state_dict.items() if not key.startswith(unused)}
    unchanged = {key: tensor for key, tensor in model_state.items() if key.startswith(unused)}
    counters = {key: torch.zeros_like(tensor) for key, tensor in model_state.items() if key.endswith(COUNTER)}
    complete = counters | file_state | unchanged
    _check_same(complete, model_state, model, source)
    return file_state, complete, classifier


def _refuse_odd_tensors(file_state: Mapping[str, Tensor], source: str) -> None:
    """Raise WeightsError for tensors that a network cannot hold, such as sparse or quantized tensors."""
    odd = [
        f"{key} ({tensor.dtype}, {tensor.layout})"
        for key, tensor in file_state.items()
        if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in PLAIN_DTYPES
    ]
    if odd:
        what = f"the file holds tensors that no network supports ({len(odd)}): {join_names(odd, MAX_KEYS)}"
        remedy = "save dense tensors of floating point or integer dtypes; the network was not changed"
        raise WeightsError(what, source, remedy)


def _compare_classifiers(
    file_state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], prefix: str, linear_name: str
) -> ClassifierOutcome:
    """Decide what to do with the classifier of the file. Its keys begin with ``prefix``."""
    own, others = ({key for key in keys if key.startswith(prefix)} for keys in (model_state, file_state))
    if not own:
        return "dropped" if others else "none"
    differs = own == others and _differ_in_classes_only(file_state, model_state, linear_name)
    return "kept" if differs else "loaded"


def _differ_in_classes_only(
    file_state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], linear_name: str
) -> bool:
    key, bias = f"{linear_name}.weight", f"{linear_name}.bias"
    if key not in model_state:
        return False
    weight, own_weight = file_state[key], model_state[key]
    if bias in model_state and file_state[bias].shape != weight.shape[:1]:
        return False
    return weight.shape[1:] == own_weight.shape[1:] and weight.shape != own_weight.shape


def _check_same(
    file_state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], model: nn.Module, source: str
) -> None:
    """Raise a WeightsError that names all differences, grouped by kind."""
    common = [key for key in model_state if key in file_state]
    differences = {
        "missing in the file": [key for key in model_state if key not in file_state],
        "unknown to the network": [key for key in file_state if key not in model_state],
        "of another shape": [
            f"{key}: {tuple(file_state[key].shape)} in the file, {tuple(model_state[key].shape)} in the network"
            for key in common
            if file_state[key].shape != model_state[key].shape
        ],
        "of an incompatible dtype": [
            f"{key}: {file_state[key].dtype} in the file, {model_state[key].dtype} in the network"
            for key in common
            if _kind(file_state[key]) != _kind(model_state[key])
        ],
    }
    if not any(differences.values()):
        return
    lines = [f"{source}: does not fit {type(model).__name__}, which was not changed:"]
    lines += [f"  {kind} ({len(keys)}): {join_names(keys, MAX_KEYS)}" for kind, keys in differences.items() if keys]
    raise WeightsError("\n".join([*lines, f"  {_advice(file_state, model_state, model)}"]))


def _advice(file_state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return the remedy for a file that does not fit."""
    if is_segmentation(file_state) and not is_segmentation(model_state):
        return (
            "these are the weights of a segmentation network, with a body and a head: pass them to deeplab_* or "
            "pyramid_*"
        )
    if is_segmentation(model_state) and not is_segmentation(file_state):
        return (
            "these are not the weights of a segmentation network, with a body and a head: if they belong to its body, "
            "pass them as body_weights to zoo.get"
        )
    if "layer1.0.conv1.weight" in file_state and "layer1.0.conv1.weight" not in model_state:
        return (
            "these are the keys of a torchvision ResNet: convert the file with `zoo convert from-torchvision SOURCE "
            "TARGET --arch NAME`, and pass TARGET, which records that its activation is relu; in Python, "
            "zoo.convert.from_torchvision converts a state dict"
        )
    unknown = [key for key in file_state if key not in model_state]
    prefix = f"{unknown[0].partition('.')[0]}." if unknown else ""
    if prefix and all(key.startswith(prefix) and key.removeprefix(prefix) in model_state for key in unknown):
        return (
            f"the keys have the prefix {prefix!r} of a module around the network, such as Lightning's: save the "
            "state dict of the network inside of it"
        )
    arguments = "options (input_3x3, norm)" if isinstance(model, Network) else "number of classes and other arguments"
    return f"pass the file of this architecture, or build the network with the file's {arguments}"


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else "whole"


def log_classifier(report: LoadReport, num_in_file: int, num_own: int) -> None:
    """Log that the classifier of a file was not loaded, with the numbers of classes of the file and the network."""
    if report.classifier == "dropped":
        logger.info("%s: the classifier was not loaded because the network has none", report.source)
    if report.classifier == "kept":
        logger.warning(
            "%s: the classifier has %s and the network %d: the network keeps its initial classifier",
            report.source, counted(num_in_file, "class"), num_own,
        )  # fmt: skip


def _warn_of_negative_scales(model: nn.Module, file_state: Mapping[str, Tensor], source: str) -> None:
    norms = [name for name, module in model.named_modules() if isinstance(module, InPlaceABN)]
    scales = [file_state[key] for name in norms if (key := f"{name}.weight".removeprefix(".")) in file_state]
    num_negative = sum(int((scale < 0).sum()) for scale in scales)
    if num_negative:
        logger.warning(
            "%s: in-place norms have %s, used as |scale| + eps; networks trained before "
            "2018-01-16 used the sign: build the network with norm='standard' for those",
            source, counted(num_negative, "negative scale"),
        )  # fmt: skip
