"""Monitoring: the numbers of every training step, their measurement, and functions that store them."""
