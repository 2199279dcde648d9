"""Recommenders beyond DLRM: rankings over crossed features, towers, histories of items."""
