"""The guard around the layer of a plug-in: its errors, output and wrong answers do not stop other layers.

The guards are made from the interface. Every public member of :class:`Declaration`, of :class:`Store` and of each part
of a layer has a guarded version, and its annotations say which answers are right. A wrong answer, or an error that no
layer may raise, is raised as :class:`PluginFailed`, a :class:`LayerError` that names the plug-in.
"""

# ruff: noqa: ANN401 - annotations have no common type, and a plug-in may answer anything

from __future__ import annotations

import collections.abc
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError, PluginFailed
from cachectl.layers.base.facts import Ability, Artifact
from cachectl.layers.base.layer import Declaration, Layer
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.registry import PLUGIN_TIMEOUT, TookTooLong, described, limited, plugin_limit
from cachectl.layers.base.store import Codec, Store, attempt

T = TypeVar("T")

#: Classes whose objects need no further check.
_PLAIN: Final = frozenset({str, bytes, bool, NoneType, object, Path})
#: The name of a variable that every shell can set.
_VARIABLE: Final = regex(r"[A-Za-z_][A-Za-z0-9_]*")


def guarded(layer: Layer, environment: Environment) -> Layer:
    """Return a plug-in's layer with its store, codec and parts guarded."""
    plugin = _Plugin(layer.name, environment)
    store = vars(layer).get("store")
    for name, codec in list(getattr(store, "__dict__", {}).items()):
        if isinstance(codec, Codec) and not isinstance(codec, _Guard):
            # The store calls the codec, so a wrong answer must be found before the store uses it.
            setattr(store, name, guard_of(Codec)(codec, plugin))
    return cast("Layer", guard_of(Layer)(layer, plugin))


@dataclass(frozen=True)
class _Plugin:
    """The plug-in of a layer, for one environment."""

    name: str
    environment: Environment

    def ask(self, question: Callable[[], T], *, soon: bool = False) -> T:
        """Run code of the plug-in; with ``soon`` within the time limit. Raises :class:`PluginFailed`."""
        limit = plugin_limit(self.environment) if soon else math.inf
        try:
            # Standard output is for data, and a plug-in may print anything.
            with redirect_stdout(sys.stderr), limited(limit) if soon else nullcontext():
                return question()
        except TookTooLong as error:
            if not soon:
                raise
            message = f"the plug-in failed: took longer than {limit:g} s; {PLUGIN_TIMEOUT} sets how long it may"
            raise PluginFailed(self.name, message) from error
        except (LayerError, KeyboardInterrupt):
            raise
        # SystemExit, Rust panics and pytest skips are not Exceptions.
        except BaseException as error:
            raise PluginFailed(self.name, f"the plug-in failed: {described(error)}") from error


# ---------------------------------------------------------------------- guards, made from the interface


class _Guard:
    """The common part of the guards of layers, stores and parts."""

    _inner: object
    _plugin: _Plugin

    def __init__(self, inner: object, plugin: _Plugin) -> None:
        self.__dict__.update(_inner=inner, _plugin=plugin)
        if isinstance(self, (Layer, Store)):
            self.__dict__.update(name=plugin.name, environment=plugin.environment)

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} of {self._member()}>"

    def _member(self, name: str = "") -> str:
        """Return the qualified name of the guarded class, or how a member of it is called."""
        kind = type(self._inner)
        return f"{kind.__qualname__}.{name}" if name else f"{kind.__module__}.{kind.__qualname__}"

    def _own(self, name: str, general: object) -> Callable[..., Any] | None:
        """Return the plug-in's version of a method, ``None`` if the general code is to run on this guard.

        The general code then asks the plug-in only guarded questions. That of a layer answers from what the plug-in
        declares, and is checked like an answer of the plug-in.
        """
        method: Callable[..., Any] = self._plugin.ask(lambda: getattr(self._inner, name))
        inherited = getattr(method, "__func__", None) is general and not isinstance(self, Layer)
        return None if inherited else method


class _LayerRules(Layer):
    """Adds abilities that fail when tried to the refusals of a layer."""

    def refusals(self) -> Mapping[Ability, str]:
        """Return the refused abilities: all of them if this question fails."""
        try:
            refused = super().refusals()
        except LayerError as error:
            return dict.fromkeys(Ability, error.message)
        tries: dict[Ability, Callable[[], object]] = {
            Ability.DISABLE: lambda: (self.switched(on=False), self.switched(on=True)),
            Ability.RELOCATE: lambda: self.relocate(self.environment.temporary),
        }
        failed = {ability: attempt(tries[ability]) for ability in tries.keys() - refused.keys()}
        return {**refused, **{one: error.message for one, error in failed.items() if isinstance(error, LayerError)}}


@cache
def guard_of(kind: type) -> Callable[[object, _Plugin], object]:
    """Make the class of guards around objects of one class of the interface."""
    overridable = Declaration if kind is Layer else kind
    members = {name: _member(overridable, name) for name in public_members(overridable)}
    # Without a module, Python would name the module abc.
    guard = type(f"Guarded{kind.__name__}", (_Guard, kind), {**members, "__module__": __name__})
    return type(guard.__name__, (_LayerRules, guard), {"__module__": __name__}) if kind is Layer else guard


def public_members(kind: type) -> set[str]:
    """Return the names of the public methods, properties and annotated attributes of a class."""
    return {name for name in (*dir(kind), *get_type_hints(kind)) if not name.startswith("_")}


def _member(kind: type, name: str) -> object:
    member = inspect.getattr_static(kind, name, None)
    if inspect.isfunction(member):
        return _method(name, member, soon=kind is Declaration)
    if isinstance(member, property):
        return _attribute(name, get_type_hints(member.fget)["return"])
    return _attribute(name, get_type_hints(kind)[name], *([member] if hasattr(kind, name) else []))


def _attribute(name: str, hint: object, *default: object) -> cached_property[object]:
    """Guard an attribute. If it is wrong, the default of the interface is used if there is one."""

    def read(self: _Guard) -> object:
        question = _Question(self._plugin, self._member(name), hint, {})
        try:
            return self._plugin.ask(lambda: question.checked(getattr(self._inner, name)), soon=True)
        except PluginFailed:
            if not default:
                raise
            return default[0]

    return cached_property(read)


def _method(name: str, general: Callable[..., Any], *, soon: bool) -> Callable[..., Any]:
    """Guard a method. An iterator is asked item by item while the caller iterates; that may take any time."""
    signature, hint = inspect.signature(general), get_type_hints(general)["return"]
    iterates = get_origin(hint) in (collections.abc.Iterator, collections.abc.Iterable)

    # Copying the attributes of an abstract method would make this one abstract too.
    @wraps(general, updated=())
    def member(self: _Guard, *arguments: object, **named: object) -> object:
        # The check reads iterators that the plug-in may have consumed.
        given = [tuple(one) if isinstance(one, Iterator) else one for one in arguments]
        own = self._own(name, general)
        if own is None:
            return general(self, *given, **named)
        asked = signature.bind(self, *given, **named).arguments
        if iterates:
            question = _Question(self._plugin, self._member(name), get_args(hint)[0], asked)
            return _each(question, lambda: own(*given, **named))
        question = _Question(self._plugin, self._member(name), hint, asked)
        return self._plugin.ask(lambda: question.checked(own(*given, **named)), soon=soon)

    return member


def _each(question: _Question, answer: Callable[[], Iterable[object]]) -> Iterator[object]:
    things, end = question.plugin.ask(lambda: iter(answer())), object()

    def following() -> object:
        thing = next(things, end)
        return thing if thing is end else question.checked(thing)

    while (thing := question.plugin.ask(following)) is not end:
        yield thing


# ---------------------------------------------------------------------- checks, made from annotations


class _Wrong(Exception):
    """A wrong answer, in words that follow "returned"."""


@cache
def _matched(hint: Any, given: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the class that an annotation asks for, and its arguments that are checked.

    For a union, the class is the member that fits the ``given`` class. Raises :class:`_Wrong` if none fits.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is ClassVar:
        return _matched(arguments[0], given)
    hints = arguments if origin in (Union, UnionType) else (hint,)
    kinds = [object if one is Any else get_origin(one) or one for one in hints]
    for one, kind in zip(hints, kinds, strict=True):
        fits = issubclass(given, (int, float) if kind is float else kind)
        if fits if given is not bool else kind in (bool, object):
            return kind, get_args(one)
    raise _Wrong(f"{_name(given)} instead of {' or '.join(map(_name, kinds))}")


def _name(kind: type) -> str:
    return "None" if kind is NoneType else kind.__name__


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    names = getattr(kind, "_fields", None) or [field.name for field in fields(kind)]
    return tuple((name, hints[name]) for name in names)


@dataclass(frozen=True)
class _Question:
    """One call of a member such as ``ToycCodec.check``; its annotation and arguments decide which answers are right."""

    plugin: _Plugin
    member: str
    hint: Any
    asked: Mapping[str, Any]

    def checked(self, answer: Any) -> Any:
        """Return an answer, or one item of it, checked. Raises :class:`PluginFailed`."""
        if self.hint is NoneType:
            return None
        try:
            right = self._checked(self.hint, answer)
            self._demand_asked(right)
        except _Wrong as wrong:
            raise self._failed(wrong) from wrong
        return right

    def _failed(self, wrong: _Wrong) -> PluginFailed:
        return PluginFailed(self.plugin.name, f"the plug-in failed: {self.member} returned {wrong}")

    def _checked(self, hint: Any, answer: Any) -> Any:
        kind, parts = _matched(hint, answer.__class__)
        if kind in _PLAIN:
            return answer
        if kind in (int, float) and (not math.isfinite(answer) or (kind is int and answer < 0)):
            raise _Wrong(f"{answer} instead of {'a count' if kind is int else 'a time'}")
        if is_dataclass(kind) or hasattr(kind, "_fields"):
            self._check_fact(kind, answer)
        elif kind is tuple and Ellipsis not in parts:
            self._check_pair(parts, answer)
        elif kind is collections.abc.Mapping:
            return {self._checked(parts[0], key): self._of_key(parts[1], key, one) for key, one in answer.items()}
        elif kind is re.Pattern:
            self._checked(parts[0], answer.pattern)
        elif issubclass(kind, Collection) and parts:
            # The numbers of a version stamp may be negative.
            check = self._integer if parts[0] is int else self._checked
            return kind(check(parts[0], one) for one in answer)
        elif kind.__module__.startswith("cachectl.") and not issubclass(kind, (Enum, BaseException)):
            environment = self.asked.get("environment", self.plugin.environment)
            return guard_of(kind)(answer, _Plugin(self.plugin.name, environment))
        return answer

    def _integer(self, hint: Any, answer: Any) -> Any:
        return _matched(hint, answer.__class__) and answer

    def _check_fact(self, kind: Any, answer: object) -> None:
        name = ""
        try:
            for name, hint in _fields(kind):
                self._checked(hint, getattr(answer, name))
        except _Wrong as wrong:
            raise _Wrong(f"{kind.__name__} whose {name} is {wrong}") from wrong
        self._demand_rules(answer)

    def _check_pair(self, parts: tuple[Any, ...], answer: tuple[object, ...]) -> None:
        if len(answer) != len(parts):
            raise _Wrong(f"{answer!r} instead of {len(parts)} things")
        for part, one in zip(parts, answer, strict=True):
            self._checked(part, one)

    def _of_key(self, hint: Any, key: str, answer: object) -> object:
        """Check the answer for one of several keys; if errors are answers, a wrong answer becomes the key's error."""
        try:
            if isinstance(answer, Artifact):
                _demand_key(answer, key)
            return self._checked(hint, answer)
        except _Wrong as wrong:
            if LayerError not in get_args(hint):
                raise
            return self._failed(wrong)

    # ------------------------------------------------------------------ rules beyond annotations

    @cached_property
    def _targets(self) -> frozenset[tuple[Path, str]]:
        return frozenset((target.root, target.key) for target in self.asked["targets"])

    def _demand_asked(self, answer: Any) -> None:
        """Refuse an answer about anything but the arguments."""
        if "keys" in self.asked and isinstance(answer, Mapping) and (others := set(answer) - set(self.asked["keys"])):
            raise _Wrong(f"{min(others)!r}, which it was not asked for")
        if "artifacts" in self.asked and len(answer) != len(self.asked["artifacts"]):
            raise _Wrong(f"{len(answer)} answers instead of {len(self.asked['artifacts'])}")
        for pattern in (one for one in self.asked.values() if isinstance(one, re.Pattern)):
            thing, tag = answer
            if pattern.fullmatch(tag.encode()) is None if tag else thing.key not in self.asked["known"]:
                raise _Wrong(f"{thing.key!r}, which does not have the tag {tag!r} that it was asked for")

    def _demand_rules(self, thing: Any) -> None:
        if getattr(thing, "layer", self.plugin.name) != self.plugin.name:
            raise _Wrong(f"{type(thing).__name__} of the layer {thing.layer!r}")
        if isinstance(thing, Artifact):
            _demand_key(thing, self.asked.get("key", thing.key))
        if isinstance(thing, facts.Root) and (not thing.path.is_absolute() or ".." in thing.path.parts):
            raise _Wrong(f"the root {str(thing.path)!r}, which is no absolute path")
        if isinstance(thing, facts.Switch):
            _demand_variables(thing)
        if "root" in self.asked and (place := _outside(thing, self.asked["root"].path)) is not None:
            raise _Wrong(f"{place}, which is not in its root")
        if "targets" in self.asked and isinstance(thing, (facts.Entry, facts.Orphan)):  # noqa: SIM102 - two questions
            if (thing.root, thing.key) not in self._targets:
                raise _Wrong(f"{thing.key!r}, which it was not asked for")


def _demand_key(artifact: Artifact, key: str) -> None:
    if artifact.key != key:
        raise _Wrong(f"the artifact of {artifact.key!r} instead of that of {key!r}")


def _outside(thing: object, root: Path) -> str | None:
    """Return the place of a thing outside a root, where files may belong to anybody; ``None`` if it is inside."""
    if isinstance(thing, (facts.Problem, facts.Finding)):
        place = thing.path if isinstance(thing, facts.Problem) else thing.root
        return None if root in (place, *place.parents) and ".." not in place.parts else str(place)
    if isinstance(thing, (facts.Entry, facts.Orphan, facts.Housekeeping)):
        key = Path(thing.key)
        inside = thing.root == root and not key.is_absolute() and ".." not in key.parts
        return None if inside else f"{thing.key!r} of {thing.root}"
    return None


def _demand_variables(switch: facts.Switch) -> None:
    """Refuse variables that no shell can set or that it would run as a command."""
    for name, content in {**dict.fromkeys(switch.unset, ""), **switch.set}.items():
        if not _VARIABLE.fullmatch(name):
            raise _Wrong(f"the variable {name!r}, which is no name of one")
        if "\0" in content:
            raise _Wrong(f"a {name} that no variable can hold")
