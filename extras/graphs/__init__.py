"""Products with sparse matrices, as graph networks multiply by them."""
