"""Benchmarks of time and memory: layers, networks, memory strategies and the input pipeline, in one result format."""
