"""Op families bound by memory: pointwise ops, norms, reductions, random numbers."""
