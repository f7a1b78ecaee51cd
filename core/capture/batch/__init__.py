"""The dimensions of a batch that hold the samples."""
