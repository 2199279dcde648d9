"""Importers of published tables that are described by a YAML file each, not by Python."""
