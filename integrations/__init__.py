"""Integrations with frameworks: transformers' Trainer, accelerate, lightning and PEFT train with panpipe.

Each module imports its framework when it is imported, and nothing else of panpipe imports these modules.
"""
