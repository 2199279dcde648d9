"""The face: command line and public API."""
