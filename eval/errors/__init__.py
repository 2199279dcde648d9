"""What errors of iterations say: where they sit, what intervals hold, what is beyond chance."""
