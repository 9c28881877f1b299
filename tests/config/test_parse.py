"""Reading experiment files: faults of the file, and properties of the parsed experiment."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "default_settings.json"


def generated() -> dict[Path, str]:
    return {GOLDEN: json.dumps(Experiment().model_dump(mode="json", exclude={"expected"}), indent=2) + "\n"}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n  "seed": 1,,\n}', ":2:13: "),
        ('{"seed": 1} // no comments', ":1:13: "),
        ("", ":1:1: "),
        ("[1]", ": should be a JSON object"),
        ("\xff", ": is not a JSON file"),
        ("[" * 100_000, ": is not a JSON file"),
    ],
)
def test_invalid_json_error_names_file_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert str(caught.value).startswith(f"{path}{where}")


def test_missing_file_is_named_and_example_given(tmp_path: Path) -> None:
    refused(ConfigError, lambda: load_experiment(tmp_path / "gone.json"), "gone.json: ", str(experiments_dir()))


def test_keys_given_twice_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"seed": 1, "optimizer": {"clip": 1, "clip": 0, "cilp": 2}, "seed": 2}')
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    lines = str(caught.value).replace(f"{path}: ", "").splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["seed", "optimizer.clip", "optimizer.cilp"]


def test_digest_depends_on_settings_and_not_on_their_spelling() -> None:
    plain = parse_experiment({}, "x.json")
    score = {"source": "a paper", "scores": {"center224": {"top1": 70.0, "top5": 90.0}}}
    spelled_out = parse_experiment(json.loads(plain.model_dump_json()) | {"expected": score}, "y.json")
    other = parse_experiment({"seed": 1}, "x.json")
    assert plain.digest() == spelled_out.digest() != other.digest()
    assert len(plain.digest()) == 64


def test_digest_of_defaults_changes_only_on_purpose() -> None:
    """Checkpoints contain the digest. After a wanted change of a default or a new key: python -m tests.golden"""
    assert {GOLDEN: GOLDEN.read_text()} == generated()
    defaults = json.dumps(json.loads(GOLDEN.read_text()), sort_keys=True)
    assert Experiment().digest() == hashlib.sha256(defaults.encode()).hexdigest()
