"""Embedding bags: sums of rows of tables, and how often a batch looks each row up."""
