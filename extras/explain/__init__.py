"""The command ``itercast explain``: the longest ops, and what a change gains."""
