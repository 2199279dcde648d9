"""The list of strangers' scripts can be read: what it says of each is known."""

import yaml
from made_files import KINDS
from scripts_of_others import LIST, Listed


def test_each_listed_script_has_a_source_and_files_that_can_be_made() -> None:
    known = yaml.safe_load(LIST.read_text())
    listed = [Listed(**facts) for facts in known["scripts"]]
    assert {one.source for one in listed} == {*known["sources"], "packages"}
    assert {kind for one in listed for file in one.files.values() for kind in file} <= set(KINDS)
