"""Traces of simulated and measured steps, their files, and the comparison of two traces."""
