"""``zoo segment``: write the class of each pixel of images into files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zoo.cli.options import Command, Positive, argument, check_writable, option
from zoo.errors import DataError
from zoo.tasks.protocols import Fusion

if TYPE_CHECKING:
    from zoo.run.segmenting import Segmented


@dataclass(frozen=True, kw_only=True)
class Segment(Command):
    """Write the class of each pixel of images into files.

    The files are OUT/KIND/NAME, with the subfolders of IN. Logits are resized to the size of the image before the
    argmax. Skips images whose files exist. Names unreadable images, continues with the others, and exits with code 2.
    """

    example = "zoo segment runs/mine/model_best.pth.tar images segmented --output overlay"
    name: str = argument("NAME")
    """Segmentation network (deeplab_* or pyramid_*), experiment, experiment file, checkpoint of zoo train, or
    hf-hub:OWNER/NAME."""
    source: Path = argument("IN")
    """Image, or folder to search recursively. Two images must not have the same name without suffix (a.jpg, a.png)."""
    out: Path = argument("OUT")
    """Folder for the files, outside of IN."""
    weights: Path | None = None
    """Weights file or published name (default: the weights of NAME)."""
    scales: tuple[float, ...] = (1.0,)
    """Factors by which the sides of the image are scaled."""
    flip: bool = False
    """Add the mirror image at each scale."""
    fusion_mode: Fusion = "mean"
    """How the class of a pixel is selected from these views: the largest mean probability (mean), the largest
    probability in any view (max), or the class that is the most probable one in most views (voting)."""
    output: tuple[Literal["palette", "ids", "prob", "overlay"], ...] = ("palette",)
    """Files to write for each image: palette (indexed PNG of the classes, with colors), ids (gray PNG of the classes,
    16 bits for more than 256), prob (npz with the class and probability of each pixel), overlay (the colors over the
    image)."""
    longest_side: Positive | None = option(metavar="PX")
    """Scale images to this longer side for the network (default: the experiment's segmentation.longest_side_val)."""
    overwrite: bool = False
    """Segment all images again and replace their files."""

    def run(self) -> int:
        from zoo.engine._process import open_process
        from zoo.run.segmenting import segment

        with open_process() as process:
            process.on_main(lambda: check_writable(self.out / "NAME.png"))
            result = segment(
                self.name,
                self.source,
                self.out,
                weights=self.weights,
                output=self.output,
                scales=self.scales,
                flip=self.flip,
                fusion=self.fusion_mode,
                longest_side=self.longest_side,
                overwrite=self.overwrite,
                process=process,
            )
        if process.is_main:
            report(result)
        return 0


def report(result: Segmented) -> None:
    """Print the number of segmented images. Raises DataError if some images failed."""
    num_images = result.written + len(result.faults)
    skipped = f", {result.skipped} already had files" if result.skipped else ""
    print(f"{result.written} of {num_images} images segmented{skipped}")
    if result.faults:
        raise DataError(
            f"{len(result.faults)} of {num_images} images could not be segmented, as listed above",
            remedy="repair or remove them, and run the same command again; it skips the other images",
        )
