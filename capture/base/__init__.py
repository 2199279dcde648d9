"""What every package uses: YAML files, lazy imports, switches, extensions, errors of users."""
