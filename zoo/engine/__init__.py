"""Training and validation: processes, optimizer, schedule, state, step, loop, checkpoints, meters."""
