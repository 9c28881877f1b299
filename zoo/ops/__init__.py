"""The mathematics of the memory-optimised layers; no modules here."""
