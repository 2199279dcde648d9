"""Op families that read or write rows by index: embeddings, bags, indexing."""
