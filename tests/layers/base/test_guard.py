"""The guard around a plug-in's layer: every error of every member names the plug-in, and everything else passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugin.cachectl_test_plugin import Notes

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, LayerError, PluginFailed
from cachectl.layers.base.facts import Ability, Root, Scope, Switch
from cachectl.layers.base.layer import Declaration, Layer
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.registry import BUILT_IN, Broken, built_in_layer, guarded, plugged_in
from cachectl.layers.base.selection import ALL
from cachectl.layers.base.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Environment({"HOME": "/here"}, Path("/here"))
ELSEWHERE = Environment({"HOME": "/elsewhere"}, Path("/elsewhere"))
ROOT = Root(Path("/somewhere/notes"), Scope.USER, "default")
GIVEN: Mapping[str, Any] = {"root": ROOT, "selection": ALL, "on": True, "environment": HERE, "key": "k", "keys": ["k"]}

#: Each class of the interface, with the attribute of a layer that has an object of it.
OWNERS = {Layer: "", Store: "store", Lookups: "lookups", Portability: "portability", Tagging: "tagging"}
METHODS = [
    (kind, name)
    for kind in OWNERS
    for name in dir(Declaration if kind is Layer else kind)
    if name[0] != "_" and inspect.isfunction(inspect.getattr_static(kind, name))
]


class Panic(BaseException):
    """As a panic of Rust's and a skip of pytest's are: no Exception."""


def guard(kind: type, **members: object) -> Any:  # noqa: ANN401 - of that class
    """Guard a layer of which an object of one class has these members, and return that object."""
    if kind is Layer:
        return guarded(type("Mine", (Notes,), members)(HERE))
    part: Any = object.__new__(
        type("Mine", (kind,), {**dict.fromkeys(getattr(kind, "__abstractmethods__", ())), **members})
    )
    layer = type("Mine", (Notes,), {} if kind is Store else {OWNERS[kind]: property(lambda _: part)})(HERE)
    if kind is Store:
        layer.store = part
    return getattr(guarded(layer), OWNERS[kind])


def ask(thing: object, name: str) -> object:
    """Call a method with some arguments, and exhaust an iterator that it returns."""
    method = getattr(thing, name)
    parameters = inspect.signature(method).parameters.values()
    positional = [GIVEN.get(one.name) for one in parameters if one.kind is not one.KEYWORD_ONLY]
    answer = method(*positional, **{one.name: True for one in parameters if one.kind is one.KEYWORD_ONLY})
    return list(answer) if isinstance(answer, Iterator) else answer


def raising(error: BaseException) -> Callable[..., Any]:
    def own(*_: object, **__: object) -> object:
        raise error

    return own


def raising_late(error: BaseException) -> Callable[..., Any]:
    def own(*_: object, **__: object) -> Iterator[object]:
        yield 1
        raise error

    return own


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=lambda one: getattr(one, "__name__", one))
def test_an_error_of_any_member_names_the_plug_in(kind: type, name: str) -> None:
    for error in (ValueError("x"), OSError("x"), Panic("x"), SystemExit("x")):
        for how in (raising, raising_late):
            thing = guard(kind, **{name: how(error)})
            if (kind, name) == (Layer, "refusals"):
                # Asked for an item of an iterator, it fails too.
                assert how is raising_late or set(thing.refusals()) == set(Ability)
                continue
            with pytest.raises(PluginFailed) as caught:
                ask(thing, name)
            assert str(caught.value) == f"notes: the plug-in failed: {type(error).__name__}: x"


@pytest.mark.parametrize("error", [LayerError("notes", "x"), BadRequest("x"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_ours_and_an_interruption_pass(error: BaseException) -> None:
    for kind, name in ((Layer, "roots"), (Store, "scan"), (Lookups, "counters")):
        with pytest.raises(type(error)) as caught:
            ask(guard(kind, **{name: raising(error)}), name)
        assert caught.value is error


def test_a_layer_in_another_environment_is_guarded_too(tmp_path: Path) -> None:
    kind = type("Mine", (Notes,), {"state": raising(ValueError("x"))})
    moved = type(guarded(kind(Environment({"HOME": str(tmp_path)}, tmp_path))))(ELSEWHERE)
    assert moved.environment is moved.store.environment is ELSEWHERE
    assert moved.roots()[0].path == Path("/elsewhere/.cache/notes")
    with pytest.raises(PluginFailed):
        moved.state()
    with pytest.raises(PluginFailed):
        moved.store.read(ROOT, 7)  # type: ignore[arg-type]


def test_a_layer_that_cannot_be_made_in_another_environment_is_named() -> None:
    def begin(self: Notes, environment: Environment) -> None:
        Layer.__init__(self, environment)
        if environment is ELSEWHERE:
            raise ValueError("x")

    layer = guarded(type("Mine", (Notes,), {"__init__": begin})(HERE))
    with pytest.raises(PluginFailed):
        type(layer)(ELSEWHERE)


def test_what_cannot_be_switched_is_refused() -> None:
    layer = guard(Layer, switched=raising(KeyError("x")))
    assert layer.refusals() == {Ability.DISABLE: "the plug-in failed: KeyError: 'x'"}
    assert guard(Layer, switched=lambda *_, **__: Switch("notes", {})).refusals() == {}


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("interface", 2, "was written for version 2 of the interface; this cachectl knows 1"),
        ("interface", None, "was written for version None of the interface; this cachectl knows 1"),
        ("name", None, "has the name None; a name is letters, digits, dots and dashes"),
        ("name", "--all", "has the name '--all'; a name is letters, digits, dots and dashes"),
        ("name", "pocl", "takes the name of the built-in layer pocl"),
        ("title", None, "has no title, or no store"),
        ("roots", raising(ValueError("x")), None),
    ],
)
def test_what_cannot_be_a_layer_is_named_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, why: str | None
) -> None:
    class Point:
        name = value = "mine"

        @staticmethod
        def load() -> type[Layer]:
            return type("Mine", (Notes,), {attribute: value})

    monkeypatch.setattr("cachectl.layers.base.registry.entry_points", lambda _: [Point])
    (found,) = plugged_in(HERE)
    assert (found.why if isinstance(found, Broken) else None) == (why and f"mine {why}")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_layer_based_on_a_built_in_one_is_taken_and_guarded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Point:
        name = value = "mine"

        @staticmethod
        def load() -> type[Layer]:
            return type("Mine", (type(built_in_layer(name, HERE)),), {"name": "mine"})

    monkeypatch.setattr("cachectl.layers.base.registry.entry_points", lambda _: [Point])
    (found,) = plugged_in(HERE)
    assert isinstance(found, Layer), found
    with pytest.raises(PluginFailed):
        found.store.read(ROOT, 7)  # type: ignore[arg-type]
