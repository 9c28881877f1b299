"""Preparing data sets from archives and bundled files, and checking them before a run."""
