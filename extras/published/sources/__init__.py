"""Importers of published iteration times: the models, plans and settings that tables state."""
