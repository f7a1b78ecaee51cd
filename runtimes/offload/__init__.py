"""Saved tensors that leave their device: to host memory, or from the host's memory to a file."""
