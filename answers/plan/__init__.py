"""Plans: what is asked for, the search, and the answer."""
