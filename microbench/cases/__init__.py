"""The models we validate, and how to build them."""
