"""Derives the programs of a stage: forward (F), backward (B), and its halves for inputs (I) and weights (W)."""
