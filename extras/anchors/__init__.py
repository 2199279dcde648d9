"""What measured steps tell of a machine."""
