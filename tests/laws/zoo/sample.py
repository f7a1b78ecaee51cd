"""A sample of the zoo, by name: who collects tests need not import every model for it."""

TRAINED = ("Long skips", "Halting", "Moving centre", "Task of the batch", "Packed lengths")
"""Some that together show most mechanisms: a tensor that crosses stages, a module that stays Python, buffers, a value
in the batch, and sizes that depend on values."""
REFUSED = ("Flagged task", "PINN")
"""Some that are refused."""
