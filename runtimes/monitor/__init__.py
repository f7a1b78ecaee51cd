"""Numbers of every training step for operators: records, their measurement, and functions that store them."""
