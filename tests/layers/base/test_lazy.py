"""Data classes and patterns that are made at their first use behave as those of the standard library."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass
from dataclasses import replace as standard_replace
from typing import ClassVar

import pytest

from cachectl.layers.base.lazy import dataclass, field, regex, replace


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    hidden: int = field(default=3, repr=False)
    kind: ClassVar = "part"


@dataclass(frozen=True)
class Base:
    one: int
    two: int = 2


@dataclass(frozen=True)
class Derived(Base):
    three: tuple[int, ...] = ()


@dataclass(slots=True)
class Changing:
    one: int = 1


def test_a_frozen_class_is_equal_by_fields_and_cannot_change() -> None:
    part = Part("x")
    assert part == Part("x", {}, hidden=3) != Part("y")
    assert repr(part) == "Part(name='x', sizes={})"
    assert Part("x").sizes is not part.sizes
    assert not hasattr(part, "__dict__")
    with pytest.raises(FrozenInstanceError):
        part.name = "y"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del part.name
    with pytest.raises(TypeError):
        Part()  # type: ignore[call-arg]
    assert Part.kind == "part"
    assert hash(Base(1)) == hash(Base(1))


def test_a_class_inherits_fields_and_may_change() -> None:
    assert Derived(1, three=(4,)) == Derived(1, 2, (4,))
    assert Derived(1) != Base(1)
    changing = Changing()
    changing.one = 5
    assert changing == Changing(5)
    with pytest.raises(TypeError):
        hash(changing)


def test_the_functions_of_the_standard_library_know_them() -> None:
    part = Part("x", {"a": 1})
    assert is_dataclass(Part)
    assert [one.name for one in fields(Part)] == ["name", "sizes", "hidden"]
    assert asdict(part) == {"name": "x", "sizes": {"a": 1}, "hidden": 3}
    assert replace(part, name="y") == standard_replace(part, name="y") == Part("y", {"a": 1})
    assert [*inspect.signature(Part).parameters] == ["name", "sizes", "hidden"]
    assert copy.deepcopy(part) == pickle.loads(pickle.dumps(part)) == part  # noqa: S301 - made by this test


def test_a_pattern_matches_as_a_compiled_one() -> None:
    found = regex("(?P<one>a+)b")
    assert found.fullmatch("aab")
    assert found.pattern == "(?P<one>a+)b"
    assert found.groupindex["one"] == 1
    assert copy.copy(found).search("xab")
