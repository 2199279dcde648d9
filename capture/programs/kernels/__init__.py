"""Kernels that are no single op of torch: of other libraries, of programs, on packed sequences."""
