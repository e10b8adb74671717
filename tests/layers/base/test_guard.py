"""The guard around a plug-in's layer: it passes on every member of the interface, and checks every answer."""

# ruff: noqa: ANN401 - annotations and answers are of any kind

from __future__ import annotations

import collections.abc
import importlib.util
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import pytest
from tiers import amount

from cachectl.layers.base.declarations import EnvSwitch, Places, at_load
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError, PluginFailed
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Bulk,
    ClearPlan,
    Entry,
    Finding,
    Foresight,
    Orphan,
    Outcome,
    Patch,
    Root,
    Scope,
    Severity,
    Switch,
    Target,
)
from cachectl.layers.base.guard import guarded, public_members
from cachectl.layers.base.layer import Declaration, Layer
from cachectl.layers.base.parts import Tagging
from cachectl.layers.base.registry import Broken, TookTooLong, plugged_in
from cachectl.layers.base.selection import ALL
from cachectl.layers.base.store import Store

PLUGIN = Path(__file__).parents[2] / "plugin"

PLACE = Path("/somewhere/notes")
ROOT = Root(PLACE, Scope.USER, "default")
ENTRY = Entry("notes", "k", PLACE, 1, 1)
ARTIFACT = Artifact("notes", "k", "notes/1", b"x")
TARGET = Target(PLACE, "k", 1, 1, ())
SWITCH = Switch("notes", {"NOTES_OFF": "1"})
HERE = Environment({"HOME": "/here"}, Path("/here"))
ELSEWHERE = Environment({"HOME": "/elsewhere"}, Path("/elsewhere"))


# ---------------------------------------------------------------------- the interface, by its annotations


def parts_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; another annotation is its own only member."""
    if get_origin(hint) is ClassVar:
        return parts_of(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def hint_of(kind: type, name: str) -> Any:
    """Return the annotation of an attribute, or of what a method or property returns."""
    member = inspect.getattr_static(kind, name, None)
    if isinstance(member, property):
        return get_type_hints(member.fget)["return"]
    return get_type_hints(member)["return"] if inspect.isfunction(member) else get_type_hints(kind)[name]


def is_interface(kind: Any) -> bool:
    """Return whether a class is one whose objects are asked, and so guarded."""
    own = isinstance(kind, type) and kind.__module__.startswith("cachectl.")
    return own and not is_dataclass(kind) and not issubclass(kind, (Enum, BaseException))


def overridable(kind: type) -> type:
    """Return the class that has the members of a kind that plug-ins may override."""
    return Declaration if kind is Layer else kind


#: The store and every part of a layer, each with the attribute of the layer that has it.
PARTS = {
    kind: name
    for name in sorted(public_members(Declaration))
    if not inspect.isfunction(inspect.getattr_static(Declaration, name, None))
    for kind in parts_of(hint_of(Declaration, name))
    if is_interface(kind)
}
MEMBERS: list[tuple[type, str]] = [(Layer, name) for name in sorted(public_members(Declaration))]
MEMBERS += [(kind, name) for kind in PARTS for name in sorted(public_members(kind))]
#: Given by the guard itself.
FIXED = {(Layer, "name"), (Store, "name"), (Store, "environment")}
METHODS = [
    (kind, name) for kind, name in MEMBERS if inspect.isfunction(inspect.getattr_static(overridable(kind), name, None))
]
ATTRIBUTES = [one for one in MEMBERS if one not in METHODS and one not in FIXED]


def test_the_interface_has_these_classes() -> None:
    assert Store in PARTS
    assert {name for kind, name in METHODS if kind is Store} >= Store.__abstractmethods__
    # What is not in Declaration is the same for every layer, and asks the declaration and the store.
    assert [name for name, member in vars(Layer).items() if isinstance(member, property)] == []
    assert vars(Layer).get("__annotations__", {}) == {}


def right(hint: Any) -> Iterator[Any]:
    """Yield a right answer for each member of an annotation's union."""
    for part in parts_of(hint):
        yield from _right(part)


def _right(hint: Any) -> Iterator[Any]:  # noqa: C901, PLR0912 - one case for each form
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    simple = {str: "k", int: 1, float: 1.5, bool: True, bytes: b"k", Path: PLACE, NoneType: None}
    if origin in simple:
        yield simple[origin]
    elif origin is LayerError:
        yield LayerError("notes", "full")
    elif origin is OSError:
        yield OSError("gone")
    elif origin is tuple and Ellipsis not in arguments:
        yield tuple(next(right(argument)) for argument in arguments)
    elif origin in (tuple, list, frozenset):
        yield from (origin([one]) for one in right(arguments[0]))
    elif origin in (collections.abc.Iterator, collections.abc.Iterable, collections.abc.Sequence):
        yield from ([one] for one in right(arguments[0]))
    elif origin is collections.abc.Mapping:
        yield from ({next(right(arguments[0])): one} for one in right(arguments[1]))
    elif origin is re.Pattern:
        yield re.compile("k" if arguments == (str,) else b"k")
    elif origin is collections.abc.Callable:
        yield lambda method: method
    elif origin in (object, Any):
        yield "anything"
    elif is_interface(origin):
        yield made(origin)
    elif issubclass(origin, Enum):
        yield from origin
    else:
        hints = get_type_hints(origin)
        values = {field.name: [*right(hints[field.name])] for field in fields(origin)} | {"layer": ["notes"]}
        first = {field.name: values[field.name][0] for field in fields(origin)}
        yield origin(**first)
        yield from (origin(**{**first, name: one}) for name in first for one in values[name][1:])


def wrong(hint: Any, value: Any) -> Iterator[Any]:  # noqa: C901, PLR0912 - one case for each form
    """Yield answers that are right but for one thing: a field or element that is None, or of another type."""
    parts = parts_of(hint)
    if not {NoneType, object, Any} & {*parts}:
        yield None
    if not {object, Any} & {*parts}:
        yield object()
    (part,) = [part for part in parts if isinstance(value, get_origin(part) or part)][:1]
    origin, arguments = get_origin(part) or part, get_args(part)
    if origin is int:
        yield -1
    elif origin is float:
        yield from (float("nan"), float("inf"))
    elif origin is tuple and Ellipsis not in arguments:
        yield value[1:]
        for number, argument in enumerate(arguments):
            yield from ((*value[:number], one, *value[number + 1 :]) for one in wrong(argument, value[number]))
    elif origin in (tuple, list, frozenset):
        for one in wrong(arguments[0], next(iter(value))):
            # The numbers of a mark may be negative.
            if one != -1:
                yield origin([one])
    elif origin is collections.abc.Mapping:
        ((key, held),) = value.items()
        yield {object(): held}
        yield from ({key: one} for one in wrong(arguments[1], held))
    elif is_dataclass(origin):
        hints = get_type_hints(origin)
        for field in fields(origin):
            for one in wrong(hints[field.name], getattr(value, field.name)):
                yield replace(value, **{field.name: one})


# ---------------------------------------------------------------------- plug-ins and their guards


def made(kind: type, **members: Any) -> Any:
    """Make an object of an interface's class that has these members."""
    own = type("Mine", (kind,), {**dict.fromkeys(getattr(kind, "__abstractmethods__", ())), **members})
    inner: Any = object.__new__(own)
    vars(inner).update({"name": "notes", "environment": HERE} if issubclass(kind, (Layer, Store)) else {})
    return inner


def guard(kind: type, environment: Any = HERE, **members: Any) -> Any:
    """Guard a layer, or a store or part of one, that has these members."""
    if kind is Layer:
        return guarded(made(Layer, **members), environment)
    return getattr(guarded(made(Layer, **{PARTS[kind]: made(kind, **members)}), environment), PARTS[kind])


def asked(guard: Any, name: str) -> Any:
    """Call a method with arguments that its answer may be about, and return the whole answer."""
    kind = next(kind for kind in (Declaration, *PARTS) if isinstance(guard, kind))
    known: dict[str, Any] = {"root": ROOT, "known": {"k"}, "environment": HERE, "on": True}
    known |= {"targets": (TARGET,), "keys": ["k"], "artifacts": [ARTIFACT], "artifact": ARTIFACT, "selection": ALL}
    hints = get_type_hints(getattr(kind, name))
    given = {
        one: known[one] if one in known else next(right(hints[one]))
        for one in inspect.signature(getattr(guard, name)).parameters
    }
    answer = getattr(guard, name)(**given)
    return list(answer) if isinstance(answer, Iterator) else answer


def fails(kind: type, name: str, own: Callable[..., Any], environment: Environment = HERE) -> str | None:
    """Return how the guard describes the failure of a member, ``None`` if it passes on an answer."""
    try:
        answer = asked(guard(kind, environment, **{name: own}), name)
    except PluginFailed as error:
        return str(error)
    if name == "refusals" and kind is Layer and len({*answer.values()}) == 1 and answer.keys() == {*Ability}:
        return f"notes: {answer[Ability.GET]}"
    # One of several answers may be wrong.
    each = answer.values() if isinstance(answer, Mapping) else ()
    return next((str(one) for one in each if isinstance(one, PluginFailed)), None)


def answering(answer: object, calls: list[object] | None = None) -> Callable[..., Any]:
    """Return a member that gives an answer and notes the call."""

    def own(*arguments: object, **_: object) -> object:
        if calls is not None:
            calls.append(arguments[0])
        print("a remark")  # noqa: T201
        return answer

    return own


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a member that raises."""

    def own(*_: object, **__: object) -> object:
        raise error

    return own


def named(one: object) -> str:
    """Name a class, an error or a member in the name of a test."""
    return getattr(one, "__name__", None) or (one if isinstance(one, str) else type(one).__name__)


each_member = pytest.mark.parametrize(("kind", "name"), MEMBERS, ids=named)
each_method = pytest.mark.parametrize(("kind", "name"), METHODS, ids=named)
each_attribute = pytest.mark.parametrize(("kind", "name"), ATTRIBUTES, ids=named)


@each_member
def test_every_member_of_the_interface_is_guarded(kind: type, name: str) -> None:
    layer = guard(kind)
    general = inspect.getattr_static(kind, name, None)
    assert (name in vars(layer)) if (kind, name) in FIXED else inspect.getattr_static(layer, name) is not general


@each_method
def test_a_plug_ins_own_answer_is_passed_on(kind: type, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in right(hint_of(overridable(kind), name)):
        calls: list[object] = []
        got = asked(guard(kind, **{name: answering(answer, calls)}), name)
        assert len(calls) == 1
        assert type(calls[0]).__name__ == "Mine"
        if is_interface(type(answer).__bases__[0]):
            assert type(got).__name__.startswith("Guarded")
        elif name == "refusals" and isinstance(answer, dict):
            assert answer.items() <= got.items()
        else:
            assert got == answer
    said = capsys.readouterr()
    assert (said.out, "a remark" in said.err) == ("", True)


@each_method
def test_a_wrong_answer_is_an_error_that_names_the_plug_in(kind: type, name: str) -> None:
    hint = hint_of(overridable(kind), name)
    iterates = get_origin(hint) in (collections.abc.Iterator, collections.abc.Iterable)
    # What a method returns that has nothing to return is not looked at.
    for answer in () if hint is NoneType else right(hint):
        wrongs: Iterator[Any] = wrong(hint, answer)
        if iterates:
            wrongs = iter([None, 7, *([one] for one in wrong(get_args(hint)[0], answer[0]))])
        # One of five shows as much of each method, if not of each kind of answer.
        for one in islice(wrongs, 0, None, amount(5, 1)):
            message = fails(kind, name, answering(one))
            assert message is not None, one
            assert message.startswith("notes: the plug-in failed: "), one


class Panic(BaseException):
    """As a panic of Rust's and a skip of pytest's are: no Exception."""


@each_method
@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), Panic("x"), SystemExit("x")], ids=named)
def test_an_exception_of_a_member_is_an_error_of_the_layer(kind: type, name: str, error: BaseException) -> None:
    assert fails(kind, name, raising(error)) == f"notes: the plug-in failed: {type(error).__name__}: x"


@each_method
def test_an_error_of_the_layer_and_an_interruption_pass(kind: type, name: str) -> None:
    for error in (LayerError("notes", "x"), KeyboardInterrupt(), TookTooLong()):
        layer = guard(kind, **{name: raising(error)})
        if (kind, name) == (Layer, "refusals") and isinstance(error, LayerError):
            assert set(layer.refusals().values()) == {"x"}
        elif isinstance(error, TookTooLong) and name in SOON and kind is Layer:
            assert "took longer than" in str(fails(kind, name, raising(error)))
        else:
            with pytest.raises(type(error)) as caught:
                asked(layer, name)
            assert caught.value is error


#: A matter of the variables alone, and so of no time.
SOON = {
    "roots",
    "state",
    "switched",
    "relocate",
    "required_roots",
    "refresher",
    "refusals",
    "elsewhere",
    "place_of_file",
}


@pytest.mark.parametrize("name", sorted(SOON))
def test_a_question_of_variables_has_a_time_limit(name: str) -> None:
    def own(*_: object, **__: object) -> object:
        while True:
            pass

    hasty = Environment({"CACHECTL_PLUGIN_TIMEOUT": "0.05"}, Path("/here"))
    assert "the plug-in failed: took longer than 0.05 s; CACHECTL" in str(fails(Layer, name, own, hasty))


@each_attribute
def test_an_attribute_that_is_wrong_has_its_default_or_fails(kind: type, name: str) -> None:
    hint = hint_of(overridable(kind), name)
    for answer in right(hint):
        got = getattr(guard(kind, **{name: answer}), name)
        assert type(got).__name__.startswith("Guarded") if got != answer else True
        for one in (*wrong(hint, answer), *([re.compile(b"bytes")] if name == "failure_trace" else [])):
            layer = guard(kind, **{name: one})
            if hasattr(kind, name) and not isinstance(inspect.getattr_static(kind, name), property):
                assert getattr(layer, name) == getattr(kind, name)
            else:
                with pytest.raises(PluginFailed):
                    getattr(layer, name)


# ---------------------------------------------------------------------- rules that annotations do not say

STRAY = replace(ENTRY, key="../outside")


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (Store, "remove", Outcome("pocl")),
        (Store, "remove", Outcome("notes", things=(replace(ENTRY, key="other"),))),
        (Store, "foresee_removal", Foresight((replace(TARGET, key="other"),))),
        (Store, "plan_everything", ClearPlan("notes", (replace(TARGET, key="../outside"),))),
        (Store, "read", replace(ARTIFACT, key="other")),
        (Store, "read", replace(ARTIFACT, layer="pocl")),
        (Store, "find", [STRAY]),
        (Store, "find", [replace(ENTRY, root=Path("/etc"))]),
        (Store, "find", [Bulk(1, 1, 1, None, None)]),
        (Store, "iter_usage", [STRAY]),
        (Store, "verify", [Finding("notes", PLACE, "k", Severity.FAILS, "c", "m", "f", STRAY)]),
        (Store, "verify", [Finding("notes", Path("/etc"), "k", Severity.FAILS, "c", "m", "f")]),
        (Store, "read_many", {"other": replace(ARTIFACT, key="other")}),
        (Store, "held_in", {"other": (PLACE,)}),
        (Store, "foresee_write", {"other": LayerError("notes", "full")}),
        (Store, "write_new", [True, True]),
        (Store, "write_new", []),
        (Tagging, "find_tagged", [(STRAY, "k")]),
        (Tagging, "find_tagged", [(ENTRY, "no such mark")]),
        (Tagging, "find_tagged", [(replace(ENTRY, key="l"), "")]),
        (Store, "in_use", [(Orphan("other", PLACE, 1, 1, 0.0, "why"), None)]),
        (Layer, "roots", (replace(ROOT, path=Path("relative")),)),
        (Layer, "required_roots", (replace(ROOT, path=Path("/a/../b")),)),
        (Layer, "diagnose", [Finding("pocl", PLACE, None, Severity.FAILS, "c", "m", "f")]),
        (Layer, "switched", replace(SWITCH, set={"A B;rm": "x"})),
        (Layer, "switched", replace(SWITCH, set={"A": "x\0y"})),
        (Layer, "relocate", replace(SWITCH, unset=frozenset({"P=Q"}))),
        (Layer, "refresher", replace(SWITCH, clear_functions=(("a",),))),  # type: ignore[arg-type]
        (Layer, "refresher", replace(SWITCH, reloads=("ab",))),  # type: ignore[arg-type]
        (Layer, "refresher", replace(SWITCH, patches=(Patch("m", None, "f", None),))),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_no_annotation_forbids_is_wrong_too(kind: type, name: str, wrong: object) -> None:
    assert str(fails(kind, name, answering(wrong))).startswith("notes: the plug-in failed: ")


def test_one_entry_that_is_wrong_keeps_no_other_from_being_read() -> None:
    other = replace(ARTIFACT, key="l")
    wrong = replace(other, detail={"n": 3})  # type: ignore[dict-item]
    answer = {"k": ARTIFACT, "l": wrong, "m": None, "n": OSError("gone"), "o": other}
    found = guard(Store, read_many=answering(answer)).read_many(ROOT, list(answer))
    assert (found["k"], found["n"]) == (ARTIFACT, answer["n"])
    assert {key for key, one in found.items() if isinstance(one, PluginFailed)} == {"l", "m", "o"}


# ---------------------------------------------------------------------- members that a plug-in inherits


def test_without_an_answer_of_its_own_every_entry_is_guarded() -> None:
    """The general code asks the guard then, and not the plug-in past it."""

    def read(_: Store, __: Root, key: str) -> Artifact:
        if key == "l":
            raise RuntimeError("on purpose")
        return replace(ARTIFACT, key=key)

    store = guard(Store, read=read, scan=lambda *_, **__: iter([ENTRY, STRAY]))
    found = store.read_many(ROOT, ["k", "l"])
    assert found["k"] == ARTIFACT
    assert isinstance(found["l"], PluginFailed)
    for ask in (store.usage, store.iter_usage, lambda root: store.find(root, ALL)):
        with pytest.raises(PluginFailed, match="which is not in its root"):
            deque(ask(ROOT), maxlen=0)


def test_one_wrong_artifact_does_not_stop_the_others() -> None:
    def write(_: Store, __: Root, key: str, ___: Artifact, *, replace: bool) -> None:
        del replace
        if key == "l":
            raise RuntimeError("on purpose")

    store = made(Store, read=answering(None), write=write, forms=("notes/1",))
    layer = guard(Layer, store=store, roots=answering((ROOT,)))
    first, second, third = layer.put_new([replace(ARTIFACT, key=key) for key in "klm"])
    assert (first, third) == (True, True)
    assert isinstance(second, PluginFailed)


def test_declarations_of_a_plug_in_are_checked() -> None:
    switch = EnvSwitch("NO NAME", off="1", read=at_load())
    with pytest.raises(PluginFailed, match="no name of one"):
        guard(Layer, switch=switch).switched(on=False)
    with pytest.raises(PluginFailed, match="no absolute path"):
        guard(Layer, places=made(Places, roots=answering((Root(Path("a"), Scope.USER, "a"),)))).roots()


def test_a_layer_in_another_environment_is_guarded_too(tmp_path: Path) -> None:
    moved = guarded(notes()(Environment({"HOME": str(tmp_path)}, tmp_path)), HERE).elsewhere(ELSEWHERE)
    assert moved.environment is moved.store.environment is ELSEWHERE
    assert moved.roots()[0].path == Path("/elsewhere/.cache/notes")
    assert type(moved).__name__ == type(guard(Layer)).__name__
    assert type(moved.store).__name__ == type(guard(Store)).__name__


def notes() -> type[Layer]:
    """Load the plug-in's layer."""
    spec = importlib.util.spec_from_file_location("cachectl_test_plugin", PLUGIN / "cachectl_test_plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer: type[Layer] = module.Notes
    return layer


@pytest.mark.parametrize(
    "name", ["interface", "name", "title", "scope", "precious", "store", "store.forms", "store.clearing_needs_room"]
)
def test_an_attribute_that_is_none_is_named_when_the_plug_in_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    environment = Environment({"HOME": str(tmp_path)}, tmp_path)
    layer: type[Layer] = type("Mine", (notes(),), {})
    owner, _, attribute = name.rpartition(".")
    setattr(layer.store if owner else layer, attribute, None)

    class Point:
        name = value = "mine"

        @staticmethod
        def load() -> type[Layer]:
            return layer

    monkeypatch.setattr("cachectl.layers.base.registry.entry_points", lambda _: [Point])
    (broken,) = plugged_in(environment)
    assert isinstance(broken, Broken)
