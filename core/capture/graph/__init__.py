"""Rewrites of a captured graph: aliases, buffers, random numbers, recurrent layers, custom autograd functions."""
