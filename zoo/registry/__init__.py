"""Resolves names to networks, weights, experiments and preprocessing. Does not import torch by itself."""
