"""The tasks of experiments, classification and segmentation: subclasses of `zoo.engine._task.Task`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.config.experiment import Experiment
    from zoo.engine._task import Task


def task_of(config: Experiment) -> Task:
    """Return the task of an experiment."""
    from zoo.tasks.classification import (
        ClassificationTask,
    )  # imported here because importing `zoo.tasks.protocols` must not import torch
    from zoo.tasks.segmentation import SegmentationTask

    return ClassificationTask(config) if config.task == "classification" else SegmentationTask(config)
