"""Models to which the user applied `parallelize_module`: every rank trains its own parts of the parameters."""
