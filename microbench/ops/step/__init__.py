"""Op families of a whole step: collectives, the host, the optimizer."""
