"""Importers of published measurements into dataset rows; one file per source."""
