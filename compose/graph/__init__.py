"""The captured step rewritten for a device: layers, memory formats, CUDA's own ops, cache reuse."""
