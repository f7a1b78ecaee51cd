"""Checkpoints: saving, reading and resuming of training."""
