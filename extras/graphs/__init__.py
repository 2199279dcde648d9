"""Graph networks: products with sparse matrices, GraphSAGE over sampled neighbours."""
