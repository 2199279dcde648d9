"""Hardware facts: one YAML file per GPU or node, every number with a source."""
