"""Eager lean training: a dispatch mode records forward, and decides what autograd saves."""
