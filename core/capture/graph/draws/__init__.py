"""Random draws of captured graphs: their seeds, their generators, and attention with dropout."""
