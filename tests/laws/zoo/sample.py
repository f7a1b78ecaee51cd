"""A sample of the zoo, by name: who collects tests need not import every model for it."""

TRAINED = (
    "Long skips", "Halting", "Quantized", "Moving centre", "ALBERT", "VAE", "Task of the batch", "Packed lengths",
)  # fmt: skip
"""Some that together show most mechanisms: tied weights and a tensor that crosses stages, a module that stays Python,
a backward of one's own, buffers, weights used by several stages, checks that are left out, a value in the batch, and
sizes that depend on values."""
REFUSED = ("Flagged task", "PINN")
"""Some that are refused."""
