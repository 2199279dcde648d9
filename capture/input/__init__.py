"""The DataLoader of a step: what its batches take, and the batches that a script takes."""
