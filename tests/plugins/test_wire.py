from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.engine.plugins._diff import Change, changes, root
from testbed.engine.plugins._wire import (
    ASSET,
    SIGNATURE,
    UNKNOWN,
    decode,
    encode,
    has_secret,
    has_unknown,
    is_unknown,
    reveal,
    secret,
)

if TYPE_CHECKING:
    from testbed.engine.plugins._wire import Props, Value

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_properties_survive_the_wire(props: Props) -> None:
    """What is encoded decodes to the same values, whole numbers as int."""
    assert decode(encode(props)) == props


@given(VALUES)
def test_a_secret_hides_nothing_but_its_mark(value: Value) -> None:
    """Marking and revealing gives the value back; marking twice marks once."""
    assert reveal([secret(value)]) == [reveal(value)]
    assert secret(secret(value)) == secret(value)
    assert has_secret({"deep": [secret(value)]})


def test_an_unknown_is_seen_behind_a_secret_and_at_any_depth() -> None:
    """Unknowns of every kind count, plain text does not."""
    assert is_unknown(secret(UNKNOWN))
    assert is_unknown("dd056dcd-154b-4c76-9bd3-c8f88648b5ff")
    assert has_unknown({"a": [{"b": UNKNOWN}]})
    assert not has_unknown({"a": ["unknown"]})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {"a": secret(1)}, {}),
        ({"a": 1}, {"a": 2}, {"a": Change.UPDATE}),
        ({"a": 1}, {"a": True}, {"a": Change.UPDATE}),
        ({}, {"a": "x"}, {"a": Change.ADD}),
        ({"a": "x"}, {}, {"a": Change.DELETE}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a.c": Change.UPDATE}),
        ({"a": [1, 2]}, {"a": [1]}, {"a[1]": Change.DELETE}),
        ({"a": [1]}, {"a": [1, 2]}, {"a[1]": Change.ADD}),
        ({"a": {"b.c": 1}}, {"a": {"b.c": 2}}, {'a["b.c"]': Change.UPDATE}),
        ({"a": "x"}, {"a": UNKNOWN}, {"a": Change.UPDATE}),
        ({"a": [1]}, {"a": "x"}, {"a": Change.UPDATE}),
        ({"a": None}, {}, {}),
    ],
)
def test_changes_are_named_by_path(old: Props, new: Props, expected: dict[str, Change]) -> None:
    """Only what differs is named, at the leaf where it differs."""
    assert changes(old, new) == expected
    assert {root(path) for path in expected} <= {"a"}


def test_assets_are_compared_by_content() -> None:
    """The same content under another path is no change; other content is."""

    def asset(path: str, digest: str) -> Props:
        return {"source": {SIGNATURE: ASSET, "path": path, "hash": digest}}

    assert changes(asset("/a", "1"), asset("/b", "1")) == {}
    assert changes(asset("/a", "1"), asset("/a", "2")) == {"source": Change.UPDATE}
