"""Measurements of others, read from their files into dataset rows; one file per source."""
