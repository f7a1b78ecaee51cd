"""Costs of operators and stages: the operator graph, stage costs, partitions, times of messages."""
