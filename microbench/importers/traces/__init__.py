"""Importer of torch.profiler traces."""
