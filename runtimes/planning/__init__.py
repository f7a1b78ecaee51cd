"""Automatic planning on the machine at hand, the contest of plans, and the cache."""
