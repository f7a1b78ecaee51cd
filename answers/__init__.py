"""Answers to a user's questions: what the commands and the explorer ask, compute and print."""
