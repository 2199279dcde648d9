"""Clocks: CPU timing, CUDA events, the profiler, NVML."""
