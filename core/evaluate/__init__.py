"""Time and memory of an order of actions where nothing contends: a reference, its compiled twin, the memory table."""
