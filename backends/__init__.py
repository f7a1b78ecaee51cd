"""Transports: how tensors move between the devices of a pipeline."""
