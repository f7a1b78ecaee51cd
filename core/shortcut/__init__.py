"""The short-cut evaluation: time and memory of compute orders by longest path, compiled, where nothing contends."""
