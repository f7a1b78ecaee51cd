"""Starts the ranks or threads of a pipeline, connects them, and checks that all have the same arguments and model."""
