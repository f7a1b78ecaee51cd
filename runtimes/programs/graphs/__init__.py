"""Captured graphs of stage programs (CUDA graphs): one for each stage, kind of action and microbatch."""
