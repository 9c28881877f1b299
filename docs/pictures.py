"""Draws the pictures of the pages from the result files.

python -m docs.pictures
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image

import zoo
from docs.tables import RESULTS, ROOT, records, result
from zoo.benchmark.model import draw_strategies
from zoo.benchmark.plot_style import Line, Panel, draw_panels
from zoo.benchmark.strategies import EAGER, choose_strategies
from zoo.files import write_bytes
from zoo.memory.plot import BLUE, ORANGE, STYLE
from zoo.reproduce.paper_report import plot_name, sections_of
from zoo.reproduce.papers import PAPERS

SWEEPS = ("lean_sweep", "lean_sweep_torchvision")
METRICS = {"peak without gradients ratio": "peak", "held ratio": "bytes held", "step ratio": "time of a step"}


def sweep() -> bytes:
    """Return a plot of lean training relative to plain training, over all networks of the sweeps."""
    lines = []
    for metric, label in METRICS.items():
        found = [
            record["median"]
            for file in SWEEPS
            for record in result(file)["records"]
            if (record["metric"], record["provider"]) == (metric, "lean")
        ]
        share = [100 * (index + 0.5) / len(found) for index in range(len(found))]
        lines.append(Line(label, share, sorted(found)))
    count = sum(len(records(file, "held ratio", provider="lean")) for file in SWEEPS)
    title = f"zoo.lean on {count} networks of timm and torchvision, the smallest of each family"
    panel = Panel("two images of 160 px or the size of the network, one CPU thread",
                  "networks, in percent, each curve in its own order", "lean / plain", lines)  # fmt: skip
    return draw_panels(title, [panel])


def strategies(name: str) -> bytes:
    """Return the plot of a benchmark, with the strategies that there still are."""
    known = {strategy.name for strategy in choose_strategies(EAGER, ["*"])}
    content: dict[str, Any] = result(name)
    kept = [each for each in content["records"] if each["provider"] in known]
    return draw_strategies({**content, "records": kept})


def section(paper: str, key: str) -> bytes:
    """Return the plot of a section of a report."""
    (found,) = (each for each in sections_of(paper, result(paper)) if each.key == key)
    return draw_panels(f"{found.title}\n{PAPERS[paper].title}", found.panels)


def predictions(weights: str, folder: Path) -> bytes:
    """Return the first image of each class, and four more, with the best class and its probability."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    classes = sorted(path for path in (folder / "val").iterdir() if path.is_dir())
    paths = [sorted(path.iterdir())[0] for path in classes] + [sorted(path.iterdir())[1] for path in classes[:4]]
    with rc_context(STYLE):
        figure = Figure((7.0, 2.6), layout="constrained")
        for place, (path, found) in enumerate(zoo.predict(weights, paths, top=1, verbose=False), start=1):
            axes = figure.add_subplot(2, 7, place)
            axes.imshow(Image.open(path), cmap="gray")
            axes.axis("off")
            is_right = found[0].name == Path(path).parent.name
            title = f"{found[0].name.replace('_', ' ')}\n{100 * found[0].probability:.0f} %"
            axes.set_title(title, fontsize=7, color=BLUE if is_right else ORANGE)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def main() -> None:
    """Write all pictures; those of predictions if there are weights."""
    if len(sys.argv) == 3:
        write_bytes(ROOT / "docs" / "predictions.png", predictions(sys.argv[1], Path(sys.argv[2])))
    write_bytes(RESULTS / "lean_sweep.png", sweep())
    write_bytes(RESULTS / "pareto_revnet164.png", strategies("pareto_revnet164"))
    for paper, key in (("inplace_abn", "table2"), ("revnet", "figure4")):
        write_bytes(RESULTS / plot_name(paper, key), section(paper, key))


if __name__ == "__main__":
    main()
