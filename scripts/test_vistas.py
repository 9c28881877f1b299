"""``zoo segment`` with the arguments and the files of the original project's test script: MODEL INPUT OUTPUT."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from zoo.cli import run_script
from zoo.cli.options import Command, argument, check_writable, option
from zoo.cli.segment import report
from zoo.tasks.protocols import Fusion

if TYPE_CHECKING:
    from zoo.registry.load_network import LoadedNetwork

NETWORK = "wider_resnet38_deeplab_vistas"  # the network of a file that does not describe its own
ENDINGS = (".jpg", ".jpeg", ".png")


def scale_list(text: str) -> tuple[float, ...]:
    """Return the numbers of a list such as "[0.7, 1, 1.2]", with or without brackets."""
    content = text.strip()
    if content[:1] + content[-1:] in ("[]", "()"):
        content = content[1:-1]
    try:
        return tuple(map(float, content.strip().removesuffix(",").split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of numbers, such as "[0.7, 1, 1.2]"') from None


@dataclass(frozen=True, kw_only=True)
class SegmentVistas(Command):
    """Write the class of each pixel of the images in INPUT to OUTPUT/NAME.png, over existing files.

    Classes are selected at the size of the network's input, a longer side of 2048 px for the published network, and
    resized to the size of the image by the nearest pixel. zoo segment resizes the logits instead, has more kinds of
    files, reads more kinds of images and searches subfolders.
    """

    model: Path = argument("MODEL")
    """Published file of Mapillary Vistas, its name wider_resnet38_deeplab_vistas, or a checkpoint of zoo train. A file
    that does not describe its network is taken for the published one."""
    source: Path = argument("INPUT")
    """Folder with .jpg, .jpeg and .png images."""
    out: Path = argument("OUTPUT")
    """Folder for the files."""
    scales: Annotated[tuple[float, ...], scale_list] = option(default=(0.7, 1.0, 1.2), metavar="LIST")
    """Factors by which the sides of the image are scaled (default: "[0.7, 1, 1.2]")."""
    flip: bool = False
    """Add the mirror image at each scale."""
    fusion_mode: Fusion = "mean"
    """How the class of a pixel is selected from these views."""
    output_mode: Literal["palette", "raw", "prob"] = "raw"
    """palette: indexed PNG with colors; raw: gray PNG of the classes; prob: raw, and NAME_prob.png with the probability
    times 255."""

    def run(self) -> int:
        """Segment the images as the original did."""
        from zoo.engine._process import open_process
        from zoo.run.label_images import ORIGINAL_KINDS
        from zoo.run.segmenting import segment
        from zoo.tasks.tta import check_views

        check_views(self.scales, self.fusion_mode)
        with open_process() as process:
            process.on_main(lambda: check_writable(self.out / "NAME.png"))
            result = segment(
                _load(self.model), self.source, self.out, output=ORIGINAL_KINDS[self.output_mode], scales=self.scales,
                flip=self.flip, fusion=self.fusion_mode, classes_at="input", overwrite=True, endings=ENDINGS,
                recursive=False, process=process,
            )  # fmt: skip
        if process.is_main:
            report(result)
        return 0


def _load(model: Path) -> LoadedNetwork:
    """Return the network of a file; without settings of a training, with the published size of images and colors."""
    from zoo.registry.load_network import load_network
    from zoo.registry.open import find_network

    found, published = find_network(model), find_network(NETWORK).experiment
    assert published is not None
    network = load_network(NETWORK, model) if found.record is None else load_network(model)
    if found.experiment is None and network.experiment.task == "segmentation":
        experiment = network.experiment.model_copy(update={"segmentation": published.segmentation})
        network = replace(network, experiment=experiment)
    return network


if __name__ == "__main__":
    raise SystemExit(run_script(SegmentVistas))
