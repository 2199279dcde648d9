"""Reports on a script: progress lines while it runs, and notes on its step."""
