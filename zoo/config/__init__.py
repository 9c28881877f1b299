"""Experiment files: schema, strict parsing, and error messages that list all problems at once."""

from zoo.config.describe import describe_options, describe_settings, leaves
from zoo.config.experiment import (
    CheckpointConfig,
    Expected,
    Experiment,
    Input,
    PublishedWeights,
    Score,
    Training,
    check_world_size,
)
from zoo.config.optimizer import Optimizer
from zoo.config.parse import experiment_names, experiments_dir, find_experiment, load_experiment, parse_experiment
from zoo.config.regularization import Regularization
from zoo.config.schedule import MIN_LINEAR_LR, Schedule
from zoo.config.segmentation_section import Segmentation

__all__ = [
    "MIN_LINEAR_LR",
    "CheckpointConfig",
    "Expected",
    "Experiment",
    "Input",
    "Optimizer",
    "PublishedWeights",
    "Regularization",
    "Schedule",
    "Score",
    "Segmentation",
    "Training",
    "check_world_size",
    "describe_options",
    "describe_settings",
    "experiment_names",
    "experiments_dir",
    "find_experiment",
    "leaves",
    "load_experiment",
    "parse_experiment",
]
