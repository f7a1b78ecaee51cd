"""Costs of operators and stages: the operator graph, stage costs, and the analytic model."""
