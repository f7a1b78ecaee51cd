"""Checks of a model by a user: the doctor, and a pipeline compared with one process."""
