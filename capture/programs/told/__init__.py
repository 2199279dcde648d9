"""What is told of a script: what it does while it runs, and notes on its step."""
