"""What to suggest: the preferred of several plans, and changes with which a plan fits."""
