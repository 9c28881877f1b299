"""The lean rule for Inductor: chooses what compiled forward graphs save, and rewrites backward graphs."""
