"""Starts the ranks or threads of a pipeline, and connects them."""
