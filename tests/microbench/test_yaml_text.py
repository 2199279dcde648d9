"""YAML is read in C: the same values, and no stack overflow by a nested text."""

from __future__ import annotations

import pytest
import yaml

from itercast.microbench.hardware.spec import HERE
from itercast.microbench.yaml_text import load_yaml


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "-\t", "? "])
@pytest.mark.parametrize("depth", [1_000, 1_000_000])
def test_a_text_nested_too_deep_is_an_exception(opening: str, depth: int) -> None:
    with pytest.raises((RecursionError, yaml.YAMLError)):
        load_yaml(opening * depth)


def test_values_are_those_of_safe_load() -> None:
    texts = [path.read_text() for path in sorted(HERE.rglob("*.yaml"))]
    texts += [
        "a: [1, 2.5, null, no, '1e3', 1.0e3, 2026-01-01, 0x10]",
        "",
        "&x [1]",
        "- é\n- |\n  b\n",
    ]
    for text in texts:
        assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.getcwd []",
        "- !!bool x\n",
        "!!timestamp x",
        "!!int ''",
        "!!float x4",
    ],
)
def test_a_tag_makes_no_object_and_fits_its_value_or_is_an_error_of_yaml(text: str) -> None:
    """PyYAML itself raises KeyError, AttributeError, IndexError and ValueError."""
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


@pytest.mark.parametrize("filler", [0, 100])  # nested values of the second are read in Python
def test_a_key_written_twice_is_named(filler: int) -> None:
    more = "".join(f"x{i}: {{}}\n" for i in range(filler))
    with pytest.raises(yaml.YAMLError, match="key 'b' is written twice, again in line 3"):
        load_yaml(f"a:\n  b: 1\n  b: 2\n{more}")
    assert load_yaml(f"a: {{b: 1}}\nc: {{b: 2}}\n{more}")["c"] == {"b": 2}
    merged = load_yaml("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n")["b"]
    assert merged == {"x": 3, "y": 2}  # a merged key may be overridden
