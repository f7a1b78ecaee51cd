"""The programs of a stage: F, B, I and W."""
