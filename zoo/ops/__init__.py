"""The mathematics of the memory-optimized layers; contains no nn.Module."""
