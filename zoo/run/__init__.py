"""Whole runs from Python: train, score, segment; logs, tables, and the environment of a measurement."""
