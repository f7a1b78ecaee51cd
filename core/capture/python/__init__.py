"""The Python around a step: what it reaches, reads, leaves in the model, and does besides computing."""
