"""Parts of a step that stay Python: regions, whole modules, and the tail of a step."""
