"""A sample of the zoo, by name: who collects tests need not import every model for it."""

TRAINED = ("Long skips", "Halting")
"""A tensor that crosses stages, and a module that stays Python. Programs of `tests/laws` show the other mechanisms."""
REFUSED = ("Flagged task",)
