"""Process groups of the processes that participate in a step."""

from zoo.layers import active_group, set_active_group

__all__ = ["active_group", "set_active_group"]
