"""The command line and the public API."""
