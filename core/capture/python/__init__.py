"""The Python of a step: objects that it reaches and reads, and changes that it makes in addition to computing."""
