"""The published numbers are as printed, each has its own key, and the experiments expect the same."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest

from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES
from zoo.config.parse import experiments_dir, load_experiment
from zoo.reproduce.measurements import measurements_of
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import PUBLISHED_DIR, PublishedNumber, published_number, published_numbers

EXPERIMENTS = {file.stem: load_experiment(file) for file in sorted(experiments_dir().glob("*.json"))}
EXPECTED = [
    (name, protocol, metric, value)
    for name, experiment in EXPERIMENTS.items()
    if experiment.expected is not None
    for protocol, score in experiment.expected.scores.items()
    for metric, value in score.model_dump(exclude_none=True).items()
]
# Expected scores that are in none of the three papers, with words of their source.
OF_OTHER_SOURCES = {
    "irevnet_cifar10": "public code of i-RevNet",
    "quickstart_fashion_mnist": "mean of seeds",
    "quickstart_scenes": "mean of seeds",
    "imagenet_convnext_tiny": "timm, results",
    "imagenet_deit_small": "README_deit",
    "imagenet_efficientnet_b0": "timm, results",
    "imagenet_mobilenet_v3_large": "torchvision, MobileNet_V3_Large_Weights",
    "imagenet_resnet50_a1": "timm, results",
    "imagenet_resnet50_a2": "timm, results",
    "imagenet_resnet50_a3": "timm, results",
    "imagenet_resnet50_torchvision_v1": "torchvision, ResNet50_Weights",
    "imagenet_resnet50_torchvision_v2": "torchvision, ResNet50_Weights",
    "imagenet_swin_tiny": "microsoft/Swin-Transformer",
    **{f"imagenet_revcol_{size}": "megvii-research/RevCol" for size in ("tiny", "small", "base")},
    **{f"revbifpn_s{size}_imagenet": "CerebrasResearch/RevBiFPN" for size in range(7)},
}


NUMBER_WORDS = {"one": 1, "two": 2, "eight": 8}


def numbers_in(text: str) -> set[float]:
    """Return the numbers in a text, written in digits or as words, without signs."""
    digits = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)}
    return digits | {NUMBER_WORDS[word] for word in NUMBER_WORDS.keys() & set(text.split())}


def is_in_its_quotation(number: PublishedNumber) -> bool:
    """Return whether the quotation has the value, in the same digits or the same words."""
    if isinstance(number.value, str):
        return number.value.lower() in number.quotation.lower()
    return abs(number.number) in numbers_in(number.quotation)


def of(value: float | str, quotation: str, kind: str = "printed") -> PublishedNumber:
    fields: dict[str, Any] = {"value": value, "quotation": quotation, "kind": kind}
    return PublishedNumber(item="Table 1", quantity="error", place="Table 1", id="a/b", evidence="count", **fields)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_printed_number_stands_in_its_quotation(paper: str) -> None:
    numbers = published_numbers(paper).values()
    printed = [number for number in numbers if number.kind == "printed"]
    assert printed
    assert [number.id for number in printed if not is_in_its_quotation(number)] == []


@pytest.mark.parametrize("paper", PAPERS)
def test_keys_are_unique_in_file_and_quantities_in_item(paper: str) -> None:
    pairs: list[tuple[str, Any]] = json.loads((PUBLISHED_DIR / f"{paper}.json").read_text(), object_pairs_hook=list)
    keys = [key for key, _ in pairs]
    assert sorted(keys) == sorted(set(keys))
    assert [key for key in keys if not re.fullmatch(r"[a-z0-9_.+-]+(/[a-z0-9_.+-]+)*", key)] == []
    quantities = [(number.item, number.quantity) for number in published_numbers(paper).values()]
    assert [pair for pair in set(quantities) if quantities.count(pair) > 1] == []


@pytest.mark.parametrize("paper", PAPERS)
def test_network_of_each_number_exists_in_zoo(paper: str) -> None:
    known = {"", *EXPERIMENTS, *ARCHITECTURES}
    assert [number.id for number in published_numbers(paper).values() if number.network not in known] == []


def test_number_needs_id_and_one_of_four_kinds() -> None:
    number = published_number("inplace_abn", "table1/resnext101_stdbn_lr_256/center224/top1")
    assert number.id == "inplace_abn/table1/resnext101_stdbn_lr_256/center224/top1"
    assert (number.paper, number.number, number.text, number.kind) == ("inplace_abn", 77.04, "77.04", "printed")
    refused(ValueError, lambda: of(1, "1", kind="guessed"), "kind")
    refused(
        ValueError,
        lambda: PublishedNumber(
            item="a", quantity="b", value=1, kind="printed", evidence="count", quotation="1", place="c"
        ),
        "\nid\n",
    )


def published_as(name: str, protocol: str, metric: str, value: float) -> list[str]:
    """Return the ids of the published numbers of an experiment that are this score, or 100 less it."""
    found = []
    for number in (number for paper in PAPERS for number in published_numbers(paper).values()):
        of_experiment = number.network == name and isinstance(number.value, (int, Decimal))
        of_experiment &= number.kind != "read off a figure"
        if number.paper == "inplace_abn":
            of_experiment &= number.id.endswith((f"/{name}/{protocol}/{metric}", f"table2/{name}/{metric}"))
        if of_experiment and value in (number.number, round(100 - number.number, 2)):
            found.append(number.id)
    return found


@pytest.mark.parametrize(("name", "protocol", "metric", "value"), EXPECTED)
def test_experiments_expect_published_numbers(name: str, protocol: str, metric: str, value: float) -> None:
    expected = EXPERIMENTS[name].expected
    assert expected is not None
    if name in OF_OTHER_SOURCES:
        assert OF_OTHER_SOURCES[name] in expected.source
    else:
        assert len(published_as(name, protocol, metric, value)) == 1


def test_every_file_of_numbers_belongs_to_paper() -> None:
    assert {file.stem for file in PUBLISHED_DIR.glob("*.json")} == PAPERS.keys()


def test_every_published_score_is_expected_by_its_experiment() -> None:
    """Of the tables and the README on InPlace-ABN, whose keys name experiment, protocol and metric."""
    scores = {f"{name}/{protocol}/{metric}" for name, protocol, metric, _ in EXPECTED}
    scores |= {f"{name}/{metric}" for name, _, metric, _ in EXPECTED}
    missing = []
    for key, number in published_numbers("inplace_abn").items():
        _, _, rest = key.partition("/")
        if number.network and key.endswith(("/top1", "/top5", "/miou")) and rest not in scores:
            missing.append(key)
    assert missing == []


MEASURED_WITH_OTHERS = {
    "inplace_abn": {"Section 1", "Section 5"},
    "revnet": {"Section 7.1"},
    "revnext": {"Section 3.4", "Section 4.3"},
}


@pytest.mark.parametrize("paper", PAPERS)
def test_measurement_is_named_after_item_of_its_numbers(paper: str) -> None:
    items = list(dict.fromkeys(number.item for number in published_numbers(paper).values()))
    found = dict.fromkeys(each.item for each in measurements_of(paper))
    assert list(found) == [item for item in items if item not in MEASURED_WITH_OTHERS[paper]]
