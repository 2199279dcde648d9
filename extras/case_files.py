"""The files of cases that the extras add."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE / "published/examples/example_cases.yaml"
KINDS = HERE / "kinds/kind_cases.yaml"
GRAPHS = HERE / "graphs/graph_cases.yaml"
POLICIES = HERE / "rl/policy_cases.yaml"
RECOMMENDERS = HERE / "recommenders/models/recommender_cases.yaml"
