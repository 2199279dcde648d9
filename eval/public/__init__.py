"""The benchmark on other people's measurements."""
