"""HTML pages with charts: of a comparison, of one family's held-out ops."""
