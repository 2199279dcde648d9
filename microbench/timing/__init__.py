"""Timing of ops: on CPUs, by CUDA events and the profiler; clocks and power by NVML."""
