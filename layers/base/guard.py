"""The guard around the layer of a plug-in: what it raises becomes an error of its layer, and stops no other.

Every public method and property of the layer, its store and its parts is wrapped. Answers are not checked: type
checkers and the conformance suite do that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property, wraps
from typing import Any, Final

from cachectl.layers.base.errors import CachectlError, LayerError, PluginFailed
from cachectl.layers.base.facts import Ability
from cachectl.layers.base.layer import Declaration, Layer
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.registry import described
from cachectl.layers.base.store import Store, attempt

#: The classes whose objects run code of a plug-in, each with the class whose public members are wrapped.
_WRAPPED: Final[Mapping[type, type]] = {
    Layer: Declaration,
    **{kind: kind for kind in (Store, Lookups, Portability, Tagging)},
}
#: The attribute of guarded classes.
_MARK: Final = "_is_guarded"


def guarded(layer: Layer) -> Layer:
    """Return a copy of a plug-in's layer with its store and parts guarded."""
    copied: Layer = _guarded(layer, layer.name)
    return copied


def _guarded(thing: Any, name: str) -> Any:  # noqa: ANN401 - any answer
    """Return an object of the interface copied into a subclass of its own class; any other as it is."""
    own: type = type(thing)
    kind = next((kind for kind in _WRAPPED if issubclass(own, kind)), None)
    if kind is None:
        return thing
    guard = thing
    if not hasattr(own, _MARK):
        guard = copy(thing)
        guard.__class__ = _guard_class(own, kind, name)
    if kind is Layer:
        guard.store = _guarded(guard.store, name)
    return guard


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


def _guard_class(own: type, kind: type, name: str) -> type:
    """Make the subclass of a plug-in's class whose public members of the interface are wrapped."""
    members: dict[str, object] = {"__module__": own.__module__, _MARK: True}
    for member in dir(_WRAPPED[kind]):
        inner = inspect.getattr_static(own, member)
        if member.startswith("_"):
            continue
        if inspect.isfunction(inner):
            members[member] = _method(inner, name)
        elif isinstance(inner, (property, cached_property)):
            members[member] = _attribute(inner, own, name)
    guard = type(own.__name__, (own,), members)
    return type(own.__name__, (_LayerRules, guard), {}) if kind is Layer else guard


def _method(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(inner)
    def member(self: object, *arguments: object, **named: object) -> object:
        with _failing(name):
            answer = inner(self, *arguments, **named)
        return _each(answer, name) if isinstance(answer, Iterator) else _guarded(answer, name)

    return member


def _attribute(inner: property | cached_property[object], own: type, name: str) -> property:
    def read(self: object) -> object:
        with _failing(name):
            return _guarded(inner.__get__(self, own), name)

    return property(read)


def _each(answers: Iterator[object], name: str) -> Iterator[object]:
    with _failing(name):
        yield from answers


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Turn what a plug-in raises into an error of its layer."""
    try:
        yield
    except (CachectlError, KeyboardInterrupt, GeneratorExit):
        raise
    # SystemExit, Rust panics and pytest skips are not Exceptions.
    except BaseException as error:
        raise PluginFailed(name, f"the plug-in failed: {described(error)}") from error
