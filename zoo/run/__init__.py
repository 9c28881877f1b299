"""What is written down: logs of a run, tables, and the machine and versions a number was measured with."""
