"""The checks of a plan, one a file; ``core/validate.py`` runs them."""
