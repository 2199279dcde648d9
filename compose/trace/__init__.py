"""Traces of simulated iterations for Perfetto."""
