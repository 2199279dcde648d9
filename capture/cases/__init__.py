"""The models that are forecast and measured, by name, and how to build them."""
