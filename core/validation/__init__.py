"""The checks of a plan, one a file; ``validate.py`` runs them."""
