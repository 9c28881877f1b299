"""Preparing data sets from archives, bundled files and Parquet files, and checking them before a run."""
