"""Schedules: pure functions from a problem to a compute order. One schedule a file; ``registry`` finds them by name."""
