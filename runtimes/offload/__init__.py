"""Offload of saved tensors: from the device to host memory, or further to a file."""
