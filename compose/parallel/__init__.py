"""Plans, and the rewrites that cut a step by tensor, context and expert parallelism."""
