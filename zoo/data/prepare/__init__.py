"""Data sets made of archives, bundled files and other formats, and checks of data sets before a run."""
