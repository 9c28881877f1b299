"""The tables and figures of the papers, beside what this package measures."""
