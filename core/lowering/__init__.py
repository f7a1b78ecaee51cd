"""From a plan to what its devices issue: lowering, queues, and the memory of a step."""
