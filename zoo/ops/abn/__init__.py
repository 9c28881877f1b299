"""In-place activated batch norm: kernels, autograd, synchronization, and the two public functions."""
