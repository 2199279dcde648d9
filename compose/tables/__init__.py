"""Embedding tables: those of a captured step, where they are placed, and in which memory."""
