"""All private names of torch that this package uses, with the behavior that it relies on, and names that have changed.

`tests/torch_internals` tests each behavior separately, so a version of torch that changes one fails a test with its
name. `tests/torch_internals/test_private_names.py` asserts that no other file uses private names of torch. Most names
are plain aliases, without cost at run time.
"""
