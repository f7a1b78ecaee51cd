"""A tenth of the zoo, by name: who collects tests need not import every model for it."""

TRAINED = (
    "Long skips", "Halting", "ELECTRA", "Quantized", "Moving centre", "ALBERT", "VAE", "Checked", "Parametrized",
    "Task of the batch", "Energy", "Packed lengths",
)  # fmt: skip
"""Some that between them show every mechanism: tied weights and a tensor that crosses stages, a module that stays
Python, an end of the step that does, a backward of one's own, buffers, weights used by several
stages, checks that are left out, computed weights, a value in the batch, and sizes that depend on values."""
REFUSED = ("Flagged task", "PINN")
"""Some that are refused."""
