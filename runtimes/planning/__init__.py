"""Automatic planning on the machine at hand, its budget, and its cache."""
