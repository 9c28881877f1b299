"""The tables and figures of the two reversible papers: what was published beside what is measured here."""
