"""The SimPy model of devices, links and memory: a runner that reads a plan and writes a trace."""
