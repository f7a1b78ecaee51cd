"""Checkpoints: what is saved, written, read and resumed."""
