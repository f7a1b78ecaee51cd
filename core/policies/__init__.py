"""Memory and communication policies: one module each declares its kinds, items, times and memory."""
