"""Pictures of steps and clusters: SVGs."""
