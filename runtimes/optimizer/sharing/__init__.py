"""What the replicas of a stage share: parts of its optimizer, gradients and parameters."""
