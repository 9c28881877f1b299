"""Everything that is read from JSON: experiment files, and the description of a network, the spec.

Parsing is strict, and an error message lists all problems at once. Nothing here imports torch.
"""
