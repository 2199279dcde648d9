"""Rewrites a captured step for a device: memory format, CUDA's ops, engine; cuts it into layers."""
