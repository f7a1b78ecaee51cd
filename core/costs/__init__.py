"""What operators and stages cost: the operator graph, stage costs, and the analytic model."""
