"""Time and memory of an order of actions without contention: a readable reference, and the same rules compiled."""
