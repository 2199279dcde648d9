"""What importers of published measurements share: reading damaged files, checking rows."""
