"""Other people's layers, contained: whatever their code raises, prints or returns, the other layers go on.

A :class:`Contained` stands in the stack for a stranger's layer. What the stranger does wrong comes out of it as a
:class:`PluginFailed`, which is a :class:`LayerError` like any other; what it cannot do for that reason is an
ability it has not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final, TypeVar

from cachectl.layers.environment import Environment
from cachectl.layers.errors import LayerError
from cachectl.layers.facts import (
    Ability,
    Artifact,
    Census,
    ClearPlan,
    Condition,
    Entry,
    Finding,
    Found,
    Hazard,
    Housekeeping,
    Note,
    Orphan,
    Outcome,
    Problem,
    Quarantined,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
)
from cachectl.layers.layer import Layer
from cachectl.layers.registry import described

T = TypeVar("T")
F = TypeVar("F", Found, Finding, "tuple[Removable, str | None]")

#: What one root or layer may raise without stopping the others.
FAILURES: Final = (LayerError, OSError)

#: What the rest of the program relies on in a fact, since a stranger's may hold anything.
_FIELDS: Final[Mapping[type, Mapping[str, type | tuple[type, ...]]]] = {
    Root: {"path": Path, "scope": Scope, "source": str, "role": str},
    State: {"condition": Condition, "why": str},
    Entry: {
        "key": str,
        "root": Path,
        "bytes": int,
        "files": int,
        "mark": tuple,
        "kernels": (tuple, type(None)),
        **dict.fromkeys(("created", "modified", "used", "written_before"), (int, float, type(None))),
        "guest": (str, type(None)),
        "versions": Mapping,
        "detail": Mapping,
    },
    ClearPlan: {"targets": tuple, "skipped": tuple, "failed": tuple},
    Orphan: {"key": str, "root": Path, "bytes": int, "files": int, "modified": (int, float), "mark": tuple},
    Housekeeping: {"key": str, "root": Path, "bytes": int, "files": int},
    Problem: {"path": Path, "code": str, "message": str},
    Census: {"entries": int, "files": int, "bytes": int, "orphan_files": int, "orphan_bytes": int},
    Outcome: {"removed": int, "bytes_freed": int, "skipped": tuple, "failed": tuple},
    Finding: {"root": Path, "severity": Severity, "message": str, "fix": str},
    Switch: {"set": Mapping, "unset": frozenset},
    Artifact: {"key": str, "form": str, "data": bytes},
}


#: What the tuples among them hold.
_ELEMENTS: Final[Mapping[type, Mapping[str, type]]] = {
    Entry: {"kernels": str, "mark": int},
    Orphan: {"mark": int},
    ClearPlan: {"targets": Target, "skipped": Note, "failed": Note},
    Outcome: {"skipped": Note, "failed": Note},
}


class PluginFailed(LayerError):
    """Somebody else's layer raised what no layer may raise, or answered what is no answer."""


class Contained(Layer):
    """A stranger's layer, every call of which ends in an answer of the right kind or in a :class:`LayerError`."""

    def __init__(self, inner: Layer, environment: Environment) -> None:
        super().__init__(environment)
        self._inner = inner
        # The registry has checked these.
        self.__dict__.update(
            name=inner.name, title=inner.title, scope=inner.scope, precious=inner.precious, forms=inner.forms
        )
        for told in ("on_network", "among_ranks", "when_closed"):
            if isinstance(hazard := getattr(inner, told, None), (Hazard, type(None))):
                self.__dict__[told] = hazard

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            # Standard output is for data; a stranger's remarks are none.
            with redirect_stdout(sys.stderr):
                return question()
        except LayerError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginFailed(self.name, f"the plug-in failed: {described(error)}") from error

    def _each(self, question: Callable[[], Iterable[F]], kinds: tuple[type, ...]) -> Iterator[F]:
        things = self._ask(lambda: iter(question()))
        while (thing := self._ask(lambda: _next(things, kinds))) is not None:
            yield thing

    # ------------------------------------------------------------------ a layer's questions

    def roots(self) -> tuple[Root, ...]:
        """Ask for the roots."""
        return self._ask(lambda: tuple(_placed(_checked(root, Root)) for root in self._inner.roots()))

    def state(self) -> State:
        """Ask for the state."""
        return self._ask(lambda: _checked(self._inner.state(), State))

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Ask for what lies in a root."""
        things = self._each(lambda: self._inner.scan(root, contents=contents), (Entry, Orphan, Housekeeping, Problem))
        for thing in things:
            # What lies elsewhere might be anybody's.
            if (stray := _outside(thing, root)) is not None:
                message = f"the plug-in failed: it lists {stray}, which is not in its root"
                raise PluginFailed(self.name, message, root.path)
            yield thing

    def census(self, root: Root) -> Census:
        """Ask for the numbers."""
        return self._ask(lambda: _checked(self._inner.census(root), Census))

    def read(self, root: Root, key: str) -> Artifact | None:
        """Ask for one entry."""
        return self._ask(lambda: _checked(self._inner.read(root, key), Artifact, type(None)))

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Ask to place an entry."""
        self._ask(lambda: self._inner.write(root, key, artifact, replace=replace))

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Ask to remove what a plan lists."""
        return self._ask(lambda: _checked(self._inner.remove(root, targets), Outcome))

    def switch(self, *, on: bool) -> Switch:
        """Ask how to turn the layer on or off."""
        return self._ask(lambda: _checked(self._inner.switch(on=on), Switch))

    def relocate(self, folder: Path) -> Switch:
        """Ask how to move the layer."""
        return self._ask(lambda: _checked(self._inner.relocate(folder), Switch))

    def verify(self, root: Root) -> Iterator[Finding]:
        """Ask what is damaged."""
        return self._each(lambda: self._inner.verify(root), (Finding,))

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Ask to move something into quarantine."""
        return self._ask(lambda: _checked(self._inner.set_aside(root, target, thing), str, type(None)))

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Ask to move something out of quarantine."""
        self._ask(lambda: self._inner.bring_back(root, thing, replace=replace))

    def refresher(self) -> Switch | None:
        """Ask how to store without reading."""
        return self._ask(lambda: _checked(self._inner.refresher(), Switch, type(None)))

    def marked(
        self, root: Root, mark: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str | None]]:
        """Ask what bears a mark."""
        return self._each(lambda: self._inner.marked(root, mark, since, known), (tuple,))

    def diagnose(self) -> Iterator[Finding]:
        """Ask what is wrong with the set-up."""
        return self._each(self._inner.diagnose, (Finding,))

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Ask what to leave alone for now."""
        return self._each(lambda: self._inner.idle_gate(targets), (tuple,))

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool | None:
        """Ask whether a path is the layer's."""
        return self._ask(lambda: _checked(self._inner.claims(root, parts), bool, type(None)))

    def lacking(self) -> tuple[Root, ...]:
        """Ask what running programs lack."""
        return self._ask(lambda: tuple(_checked(root, Root) for root in self._inner.lacking()))

    def plan_everything(self, root: Root) -> ClearPlan | None:
        """Ask for the plan of a whole root."""
        return self._ask(lambda: _checked(self._inner.plan_everything(root), ClearPlan, type(None)))

    def refusals(self) -> Mapping[Ability, str]:
        """Ask what cannot be done; a switch or a move that fails is one of these, and so is everything if asking is."""
        try:
            asked = self._ask(self._inner.abilities)
        except LayerError as error:
            return dict.fromkeys(Ability, error.message)
        refused = {ability: reason for ability, reason in asked.items() if reason is not None}
        tries: dict[Ability, Callable[[], object]] = {
            Ability.DISABLE: lambda: (self.switch(on=False), self.switch(on=True)),
            Ability.RELOCATE: lambda: self.relocate(self.environment.temporary),
        }
        failed = {ability: _failure(tries[ability]) for ability in tries.keys() - refused.keys()}
        return refused | {ability: message for ability, message in failed.items() if message is not None}


def _placed(root: Root) -> Root:
    """Return a root that can be one. Raises :class:`TypeError` for a place that nobody could name."""
    if not root.path.is_absolute() or ".." in root.path.parts:
        raise TypeError(f"answered with the root {str(root.path)!r}, which is no absolute path")
    return root


def _outside(thing: Found, root: Root) -> str | None:
    """Return what is listed, if it is in another place than the root that was asked about."""
    place = Path(thing.path) if isinstance(thing, Problem) else thing.root
    if isinstance(thing, Problem):
        return None if root.path in (place, *place.parents) and ".." not in place.parts else str(place)
    key = Path(thing.key)
    inside = place == root.path and not key.is_absolute() and ".." not in key.parts
    return None if inside else f"{thing.key!r} of {place}"


def _failure(question: Callable[[], object]) -> str | None:
    try:
        question()
    except LayerError as error:
        return error.message
    return None


def _next(things: Iterator[T], kinds: tuple[type, ...]) -> T | None:
    for thing in things:
        return _checked(thing, *kinds)
    return None


def _checked(value: T, *kinds: type) -> T:
    """Return an answer of one of the given kinds whose fields are what they should be.

    Raises :class:`TypeError` for any other.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"answered with {type(value).__name__} where {kinds[0].__name__} is due")
    for name, kind in _FIELDS.get(type(value), {}).items():
        if not isinstance(getattr(value, name), kind):
            raise TypeError(f"{type(value).__name__}.{name} is {type(getattr(value, name)).__name__}")
    for name, kind in _ELEMENTS.get(type(value), {}).items():
        if not all(isinstance(element, kind) for element in getattr(value, name) or ()):
            raise TypeError(f"{type(value).__name__}.{name} holds what is no {kind.__name__}")
    if isinstance(value, tuple) and not _is_gated(value):
        raise TypeError("answered with a tuple that is no entry with a reason")
    return value


def _is_gated(pair: tuple[object, ...]) -> bool:
    """Tell whether a tuple is what :meth:`Layer.idle_gate` yields."""
    return len(pair) == 2 and isinstance(pair[0], (Entry, Orphan)) and isinstance(pair[1], (str, type(None)))  # noqa: PLR2004
