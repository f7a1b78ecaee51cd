"""Which dimensions of a batch hold the samples."""
