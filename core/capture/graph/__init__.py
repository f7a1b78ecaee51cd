"""Rewrites of a captured graph: aliases, buffers, random numbers, recurrent layers, user's functions."""
