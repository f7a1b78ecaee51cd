"""The plan: actions in order, what is lowered from them, and what devices hold meanwhile."""
