"""Patterns that are compiled at their first use behave as those of the standard library."""

from __future__ import annotations

import copy

from cachectl.layers.base.lazy import regex


def test_a_pattern_matches_as_a_compiled_one() -> None:
    found = regex("(?P<one>a+)b")
    assert found.fullmatch("aab")
    assert found.pattern == "(?P<one>a+)b"
    assert found.groupindex["one"] == 1
    assert copy.copy(found).search("xab")
