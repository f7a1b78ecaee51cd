"""Training and evaluation steps, and what stages hold of the user's model."""
