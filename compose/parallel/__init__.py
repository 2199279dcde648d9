"""Parallel plans, and the rewrites of a step for tensor, context and expert parallelism and fp8."""
