"""What one training step does: its op calls, captured programs, cases and plans."""
