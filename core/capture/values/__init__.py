"""Values in a step: nestings and batches, fake tensors, numbers that Python asks for, and the user's lines."""
