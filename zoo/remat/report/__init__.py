"""The proof and the report: `zoo.check` and `zoo.memory_report`, and the block checkpointing they compare with."""
