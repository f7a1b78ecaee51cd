"""The detection and report of failures: ranks that die, and ranks that hang."""
