"""A fleet: measures many machines through Ray, trains op families on many."""
