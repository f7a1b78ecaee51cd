"""Time and memory of an order of actions where nothing contends: a reference and its compiled twin."""
