"""Op families bound by memory: pointwise ops, norms, reductions, pooling, random numbers."""
