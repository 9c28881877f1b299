"""``zoo push``: publish weights on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.cli.options import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Publish weights on the Hugging Face Hub, with a model card.

    Creates the repository if it does not exist, and writes model.safetensors, config.json and, unless there is one,
    README.md. zoo.get("hf-hub:OWNER/NAME") loads it. Log in first with hf auth login, or set HF_TOKEN.
    """

    example = "zoo push resnet18 runs/mine/model_best.pth.tar OWNER/NAME"
    name: str = argument("NAME")
    """Network (zoo list), experiment, experiment file, or checkpoint of zoo train."""
    weights: Path = argument("FILE")
    """Weights file or published name."""
    repository: str = argument("OWNER/NAME")
    """Repository on the Hub."""
    license: str | None = option(metavar="ID")
    """License of the weights, by the Hub's name, such as apache-2.0 (default: the license of published weights)."""

    def run(self) -> int:
        from zoo.run.publishing import push

        print(push(self.name, self.repository, weights=self.weights, license_id=self.license))
        return 0
