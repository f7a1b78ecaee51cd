"""The executor: one device's lowered actions, run in order."""
