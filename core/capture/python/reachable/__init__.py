"""What a step can reach: a walk from the step and the model along the names that code uses, and how values compare."""
