"""The search for cuts and orders together."""
