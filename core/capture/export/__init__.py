"""From a training step to the operator graph."""
