"""All private names of torch that this package uses, with the behavior it relies on, and names that have changed.

`tests/torch_internals` tests each behavior separately, so that a version of torch that changes one fails a test named
after it. `tests/torch_internals/test_private_names.py` asserts that no other file uses private names of torch. Most
names are plain aliases without run-time cost.
"""
