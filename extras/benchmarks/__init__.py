"""Commands behind figures of the documentation: speed, memory, scale, programs, pairs of plans."""
