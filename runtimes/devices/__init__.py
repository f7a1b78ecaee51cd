"""The devices of this process: where to compute, their memory, and the machine."""
