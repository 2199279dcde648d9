"""The GPU campaign: measures ops and iterations within a budget and writes one archive."""
