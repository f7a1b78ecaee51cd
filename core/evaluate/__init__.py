"""Time and memory of an order of actions where nothing contends: a readable reference, and its compiled twin."""
