"""What a script repeats and what runs once or twice here: like micro-batches, evaluations."""
