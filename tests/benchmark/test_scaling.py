"""The model of training on many accelerators: its formulas by hand, and its inputs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.scaling import COUNTS, Job, Link, job_of, step_s
from zoo.cli import main

LINK = Link(bytes_per_s=1e9, latency_s=1e-3)
JOB = Job(batch=32, compute_s=0.3, gradient_bytes=10**8)
OPTIONS = ["--images-per-s", "100", "--bandwidth", "25", "--latency", "20", "--rounds", "0"]


def test_one_accelerator_sends_nothing() -> None:
    job = replace(JOB, norm_channels=(64, 64))
    assert step_s(job, LINK, 1, overlap=False) == step_s(job, LINK, 1, overlap=True) == pytest.approx(0.3)


def test_gradients_take_two_rounds_of_messages_and_are_hidden_behind_backward() -> None:
    exposed = 2 * 2 * 1e-3 + 2 * 3 / 4 * 0.1  # four accelerators
    assert step_s(JOB, LINK, 4, overlap=False) == pytest.approx(0.3 + exposed)
    assert step_s(JOB, LINK, 4, overlap=True) == pytest.approx(0.3)
    slow = replace(LINK, bytes_per_s=2e8)
    assert step_s(JOB, slow, 4, overlap=True) == pytest.approx(0.3 + 4e-3 + 0.75 - 0.2)


def test_a_synchronised_norm_takes_three_rounds_which_nothing_hides() -> None:
    without, with_norms = (
        step_s(replace(JOB, norm_channels=channels), replace(LINK, bytes_per_s=math.inf), 2, overlap=True)
        for channels in ((), (8, 16))
    )
    assert with_norms - without == pytest.approx(2 * 3 * 1e-3)


def test_a_slow_input_and_too_few_cores_decide_the_step() -> None:
    assert step_s(replace(JOB, input_images_per_s=64), LINK, 1, overlap=True) == pytest.approx(0.5)
    assert step_s(replace(JOB, at_once=2, gradient_bytes=0), replace(LINK, latency_s=0), 3, overlap=False) == (
        pytest.approx(0.45)
    )


def test_more_accelerators_are_never_more_efficient_each() -> None:
    job = job_of(Setup("resnet18", batch=32, size=64), "sync", compute_s=0.1)
    steps = [step_s(job, LINK, count, overlap=overlap) for overlap in (False, True) for count in COUNTS]
    assert steps[: len(COUNTS)] == sorted(steps[: len(COUNTS)])
    assert steps[len(COUNTS) :] == sorted(steps[len(COUNTS) :])


def test_a_job_has_the_gradients_and_norms_of_its_network() -> None:
    setup = Setup("resnet18", batch=32, size=64)
    job = job_of(setup, "sync", 0.1)
    assert (job.gradient_bytes, len(job.norm_channels)) == (4 * 11_689_512, 20)
    assert job_of(setup, "inplace", 0.1).norm_channels == ()


def test_the_command_takes_rates_of_decoding_from_a_file_and_says_what_a_day_needs(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"images_per_s": {"train": {"read to collate": 50.0}}}))
    stem = tmp_path / "scaling"
    assert main(["benchmark", "scaling", "resnet18", "--decode", str(data), "--out", str(stem), *OPTIONS]) == 0
    records = json.loads(stem.with_suffix(".json").read_text())["records"]
    found = {(record["provider"], record["metric"]): record["median"] for record in records}
    assert {provider for provider, _ in found} == {f"{count} accelerator{'s' * (count > 1)}" for count in COUNTS}
    assert found["1 accelerator", "efficiency, nothing hidden"] == pytest.approx(1)
    assert found["1 accelerator", "cores that decode"] == pytest.approx(2)
    assert found["1 accelerator", "images in a day"] == pytest.approx(8.64)
    assert found["1 accelerator", "disk"] == pytest.approx(11.0)
    assert found["8 accelerators", "images in a day"] < 8 * 8.64


@pytest.mark.parametrize("decode", ["fast", "0", "{tmp}/none.json", "{tmp}/other.json"])
def test_a_rate_of_decoding_that_is_none_is_one_line(
    tmp_path: Path, decode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("[]")
    arguments = ["--decode", decode.format(tmp=tmp_path), "--out", str(tmp_path / "x"), *OPTIONS]
    assert main(["benchmark", "scaling", "resnet18", *arguments]) == 2
    assert "give" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.dist
def test_processes_of_this_machine_are_measured_and_predicted(tmp_path: Path) -> None:
    stem = tmp_path / "scaling"
    options = [*OPTIONS[:-1], "1", "--check-size", "32", "--structure", "1x1x1x1"]
    assert main(["benchmark", "scaling", "resnet18", "--decode", "100", "--out", str(stem), *options]) == 0
    records = json.loads(stem.with_suffix(".json").read_text())["records"]
    found = {(record["provider"], record["metric"]): record["median"] for record in records}
    for provider in ("1 process", "2 processes", "3 processes"):
        assert found[provider, "predicted / measured"] == pytest.approx(
            found[provider, "predicted"] / found[provider, "measured"]
        )
    assert found["1 process", "predicted / measured"] == 1
