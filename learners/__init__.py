"""Learns op times: turns measured rows into features, and fits one model per op family.

The models together are saved as a bundle.
"""
