"""Orders of single operators on a given placement: lower bounds, and beam searches over states."""
