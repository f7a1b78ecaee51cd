"""Checks of a user's model: `panpipe doctor`, and the comparison of a pipeline with one process."""
