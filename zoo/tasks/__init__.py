"""The tasks that experiments train for: each a `zoo.engine.task.Task` with its loss, scores, views and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.engine.task import Task


def task_of(config: Experiment) -> Task:
    """Return the task that the network of an experiment is for."""
    from zoo.tasks.classification import ClassificationTask  # here, as `zoo.tasks.protocols` does without torch
    from zoo.tasks.segmentation import SegmentationTask

    return ClassificationTask(config) if config.task == "classification" else SegmentationTask(config)
