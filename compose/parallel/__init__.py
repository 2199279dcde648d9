"""Parallel plans; rewrites for tensor, context, expert parallelism, products in 8 and 4 bits."""
