"""Finds the model that a script trains, and captures it in other batches than its own."""
