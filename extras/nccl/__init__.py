"""Imports logs of nccl-tests: text of its programs, and their JSON."""
