"""The kinds of ranks that work together on one stage; what they exchange is in ``core/costs/reductions``."""

TENSOR_RANKS, CONTEXT_RANKS, EXPERT_RANKS = "tensor", "context", "experts"
