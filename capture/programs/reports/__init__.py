"""Reports on a script: what it does while it runs, and notes on its step."""
