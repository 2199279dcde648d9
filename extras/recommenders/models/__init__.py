"""Recommenders beyond DLRM: rankings over crossed features, towers of users and items, histories.

``CASES`` is the file of their cases.
"""

from pathlib import Path

CASES = Path(__file__).with_name("recommender_cases.yaml")
