"""How long a step takes: the engine of any plan, and its rules compiled for searches, with and without shared links."""
