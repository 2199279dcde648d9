"""The command ``itercast import``, and the importer of torch.profiler traces."""
