"""What the backward of a stage computes again instead of F saving it."""
