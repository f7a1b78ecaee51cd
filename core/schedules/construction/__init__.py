"""What builders of schedules share: orders of loops, list scheduling under a memory limit, local search."""
