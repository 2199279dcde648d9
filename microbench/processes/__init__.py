"""Worker processes: start them, time several ranks at once, watch and end them."""
