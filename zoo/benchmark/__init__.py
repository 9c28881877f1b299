"""Time and memory of layers, networks and memory-saving strategies, in one format."""
