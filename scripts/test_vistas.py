"""Segment images with a Vistas model, with the arguments and output files of the original project's test script."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from zoo.cli import run_script
from zoo.cli.options import Command, Positive, WholeNumber, argument, check_writable, option
from zoo.cli.segment import Scales, ViewOptions, print_result
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.run.label_images import Palette
    from zoo.run.segmenting import Outputs
    from zoo.tasks.tta import Segments

NETWORK = "wider_resnet38_deeplab_vistas"


@dataclass(frozen=True, kw_only=True)
class SegmentVistas(Command, ViewOptions):
    """Segment the images of IN_DIR with a WideResNet-38 DeepLab model of Mapillary Vistas.

    Writes OUT_DIR/NAME.png and replaces existing files. Images are scaled to a longer side of 2048 px. Classes are
    chosen at that size and resized to the size of the image (zoo segment resizes the logits).
    """

    snapshot: Path = argument("SNAPSHOT")
    """Model: a file with body, head and cls."""
    source: Path = argument("IN_DIR")
    """Folder of images, which is searched recursively."""
    out: Path = argument("OUT_DIR")
    """Folder for the files, outside of IN_DIR."""
    scales: Scales = option(default=(0.7, 1.0, 1.2), metavar="LIST")
    """Factors by which the sides of the image are scaled, separated by commas (default: 0.7, 1, 1.2)."""
    fusion_mode: Literal["mean", "voting", "max"] = "mean"
    """How predictions of the views are combined."""
    output_mode: Literal["palette", "raw", "prob"] = "raw"
    """palette: indexed PNG with colors; raw: gray PNG of the classes; prob: raw, and NAME_prob.png with the probability
    times 255."""
    world_size: Positive | None = None
    """Number of processes, one per GPU, which are started unless --rank is given (default: the number of GPUs, or of
    processes that torchrun started)."""
    rank: WholeNumber | None = None
    """Segment only the share of process N of --world-size, on GPU N."""

    def run(self) -> int:
        """Write the files and print a summary; DataError if some images could not be segmented."""
        import torch

        from zoo.engine.process import open_process
        from zoo.run.label_images import palette_of
        from zoo.run.scoring import load_network
        from zoo.run.segmenting import segment_images
        from zoo.tasks.tta import TestTimeAugmentation

        views = TestTimeAugmentation(self.scales, self.flip, self.fusion_mode)
        is_launched = not os.environ.keys().isdisjoint({"RANK", "WORLD_SIZE"})
        if is_launched and (self.rank, self.world_size) != (None, None):
            raise ConfigError("a launcher set rank and world size of this process; remove --rank and --world-size")
        num_processes = self.world_size or (1 if is_launched else max(1, torch.cuda.device_count()))
        if self.rank is not None and self.rank >= num_processes:
            raise ConfigError(f"--rank {self.rank} is not one of the {num_processes} processes of --world-size")
        if self.rank is None and num_processes > 1:
            return self._start_processes(num_processes)
        local_rank = self.rank if self.local_rank is None else self.local_rank
        with open_process(local_rank, self.dist_backend) as process:
            if self.rank is not None:  # as in the original, the processes do not communicate
                process = replace(process, rank=self.rank, world_size=num_processes)
            check_writable(self.out / "NAME.png")
            network = load_network(NETWORK, self.snapshot)
            section = network.experiment.segmentation
            assert section is not None
            result = segment_images(
                network,
                self.source,
                original_files(self.out, self.output_mode, palette_of(network.experiment, network.class_names)),
                views,
                process=process,
                longest_side=section.longest_side_val,
                overwrite=True,
                at_image_size=False,
            )
        if process.is_main or self.rank is not None:
            print_result(result)
        return 0

    def _start_processes(self, num_processes: int) -> int:
        """Run this command line once per process, with the rank; return the largest exit code."""
        script, *words = shlex.split(self.command_line)
        command = [sys.executable, script, "--world-size", str(num_processes)]
        processes = [subprocess.Popen([*command, "--rank", str(rank), *words]) for rank in range(num_processes)]
        try:
            return max(process.wait() % 256 for process in processes)
        finally:
            for process in processes:
                process.terminate()  # does nothing if it has ended


def original_files(out: Path, mode: str, palette: Palette) -> Outputs:
    """Return the outputs of Inplace-ABN's test script: OUT/NAME.png, with the subfolders of the images.

    Classes are chosen at the size that the network saw. Each pixel of the image takes the nearest one.

    Args:
    - `out`: the folder OUT.
    - `mode`: "palette" for an indexed NAME.png, "raw" for gray values, "prob" for these and NAME_prob.png with the
      probability times 255, truncated.
    - `palette`: colors and names of at most 256 classes.
    """
    from zoo.run.label_images import id_image, palette_image, write_png

    def write(path: Path, image: Image.Image, picture: Image.Image) -> None:
        write_png(path, picture.resize(image.size, Image.Resampling.NEAREST))

    def write_classes(path: Path, image: Image.Image, segments: Segments) -> None:
        classes = segments.classes.numpy()
        write(path, image, palette_image(classes, palette) if mode == "palette" else id_image(classes, 256))

    def write_probabilities(path: Path, image: Image.Image, segments: Segments) -> None:
        write(path, image, Image.fromarray((segments.probabilities.numpy() * 255).astype(np.uint8)))

    return {(out, ".png"): write_classes} | ({(out, "_prob.png"): write_probabilities} if mode == "prob" else {})


if __name__ == "__main__":
    raise SystemExit(run_script(SegmentVistas))
