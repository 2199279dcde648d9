"""Measures a DataLoader stage by stage: what its batches take in a process and in a worker."""
