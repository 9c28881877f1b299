"""The plot of a training step shows the bytes of the report's peaks, and names modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import zoo
from tests.remat.programs import images, network


def test_timelines_have_peaks_of_report_and_end_with_gradients() -> None:
    model = network()
    report = zoo.memory_report(model, images(32))
    assert [*report.timelines] == ["plain training", "lean training"]
    gradients = sum(each.nbytes for each in model.parameters())
    for timeline, peak in zip(report.timelines.values(), (report.plain_peak, report.peak), strict=True):
        assert max(timeline.bytes) == peak
        assert timeline.bytes[-1] >= timeline.bytes[0]
        assert timeline.bytes[-1] <= timeline.bytes[0] + gradients + images(32).nbytes
        assert 0 < timeline.end_of_forward < len(timeline.bytes)
        assert [name for _, name in timeline.starts] == [name for name, _ in model.named_children()]
    held = [timeline.bytes[timeline.end_of_forward] for timeline in report.timelines.values()]
    assert held[1] < held[0]


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    zoo.memory_report(network(), images(32)).plot(tmp_path / "memory.png")
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]
    with Image.open(tmp_path / "memory.png") as image:
        assert image.width > 600


@pytest.fixture(scope="module")
def report() -> zoo.MemoryReport:
    pytest.importorskip("matplotlib")
    return zoo.memory_report(nn.Linear(2, 2), torch.randn(2, 2))


@pytest.mark.parametrize(
    ("name", "magic"),
    [
        ("memory.pdf", b"%PDF"),
        ("memory.svg", b"<?xml"),
        ("memory.PNG", b"\x89PNG"),
        ("run.1/memory.jpg", b"\xff\xd8\xff"),
        ("memory.v2.jpeg", b"\xff\xd8\xff"),
        ("memory.eps", b"%!PS"),
    ],
)
def test_plot_has_format_of_suffix(name: str, magic: bytes, report: zoo.MemoryReport, tmp_path: Path) -> None:
    report.plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_plot_without_path_is_shown_in_notebook(report: zoo.MemoryReport) -> None:
    from matplotlib.figure import Figure

    figure = report.plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")  # IPython calls it
    figure.axes[0].set_title("ResNet-50")  # the figure can be changed
