"""What is fitted to published measurements: the shipped bundles, hosts, widths of intervals."""
