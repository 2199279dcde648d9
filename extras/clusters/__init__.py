"""Training on unlike GPUs: clusters from files, and the best split of a step over them."""
