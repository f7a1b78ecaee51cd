"""Compiled programs of stages, bound to the tensors that they run on."""
