"""Captured lean training: chooses what forward graphs of torch.compile save, and rewrites backward graphs."""
