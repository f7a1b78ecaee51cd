"""Batches: cutting them into microbatches, programs by shape, and the check that all ranks have the same batch."""
