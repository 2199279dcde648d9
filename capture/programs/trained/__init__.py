"""The model that a script trains: how it is found, and captured in other batches than its own."""
