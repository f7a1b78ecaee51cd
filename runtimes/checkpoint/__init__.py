"""Checkpoints of training: writing, reading and resuming."""
