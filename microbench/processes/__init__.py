"""Worker processes: started, timed together, watched, ended."""
