"""The search for the fastest schedule under a memory limit."""
