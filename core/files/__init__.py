"""Reading and writing files: every reader has limits, every output is replaced as a whole."""
