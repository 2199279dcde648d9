"""The interval of a forecast iteration, from those of its ops."""
