"""The Python state of a step: which objects it reaches and reads, and which it changes (side effects)."""
