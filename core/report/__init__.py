"""The report: one self-contained HTML page about a plan, its prediction and its measurement."""
