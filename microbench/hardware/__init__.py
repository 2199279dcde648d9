"""Facts about GPUs and nodes: one YAML file each, every number with its source."""
