"""A guard around the layer of a plug-in: errors, output and wrong answers of its code do not stop other layers.

The stack holds a :class:`Contained` instead of the layer of a plug-in. It passes on every member of :class:`Layer`. An
error or a wrong answer of the plug-in is raised as :class:`PluginFailed`, a :class:`LayerError` that names it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final, TypeVar

from cachectl.layers.base.deadline import TookTooLong, limited
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import (
    Ability,
    Artifact,
    Bulk,
    Census,
    ClearPlan,
    Condition,
    Counted,
    Entry,
    Finding,
    Flag,
    Foresight,
    Found,
    Hazard,
    Housekeeping,
    Note,
    Orphan,
    Outcome,
    Patch,
    Problem,
    Quarantined,
    Removable,
    Root,
    Scope,
    Severity,
    State,
    Switch,
    Target,
    Unverified,
    When,
)
from cachectl.layers.base.layer import Layer, StoreLayer
from cachectl.layers.base.registry import PLUGIN_TIMEOUT, described, plugin_limit
from cachectl.layers.base.selection import Selection
from cachectl.layers.base.store import Store

T = TypeVar("T")
F = TypeVar("F", bound="Counted | Finding | Unverified | tuple[Removable, str | None]")
C = TypeVar("C", bound=Counted)

#: What one root or layer may raise without stopping the others.
FAILURES: Final = (LayerError, OSError)

#: What a scan yields.
#: A number that may be unknown.
_COUNT: Final = (int, type(None))
_FOUND: Final = (Entry, Orphan, Housekeeping, Problem)
_WORDS: Final = (str, type(None))
_TIME: Final = (int, float, type(None))
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
        **dict.fromkeys(("created", "modified", "used", "written_before"), _TIME),
        **dict.fromkeys(("device", "stale_because", "guest"), _WORDS),
        "stale": (bool, type(None)),
        "versions": Mapping,
        "detail": Mapping,
    },
    ClearPlan: dict.fromkeys(("targets", "skipped", "failed", "remake"), tuple),
    Target: {"root": Path, "key": str, "bytes": int, "entries": int, "mark": tuple},
    Note: {"key": str, "because": str},
    Orphan: {
        "key": str,
        "root": Path,
        "bytes": int,
        "files": int,
        "modified": (int, float),
        "why": str,
        "mark": tuple,
        **dict.fromkeys(("idle_only", "kept"), bool),
    },
    Housekeeping: {"key": str, "root": Path, "bytes": int, "files": int, "modified": _TIME, "fixed": bool},
    Problem: {"path": Path, "code": str, "message": str},
    Bulk: {
        **dict.fromkeys(("entries", "files", "bytes"), int),
        **dict.fromkeys(("oldest", "newest"), _TIME),
        "stale": (bool, type(None)),
    },
    Census: {
        **dict.fromkeys(("entries", "files", "bytes", "orphan_files", "orphan_bytes"), _COUNT),
        **dict.fromkeys(("stale_entries", "stale_bytes"), _COUNT),
        **dict.fromkeys(("oldest", "newest"), _TIME),
        "problems": tuple,
    },
    Foresight: {"going": tuple, "bytes_freed": int, "skipped": tuple, "failed": tuple},
    Outcome: {"removed": int, "bytes_freed": int, **dict.fromkeys(("skipped", "failed", "remade"), tuple)},
    Finding: {
        "root": Path,
        "key": _WORDS,
        "severity": Severity,
        "code": str,
        "message": str,
        "fix": str,
        "thing": (Entry, Orphan, type(None)),
    },
    Unverified: {**dict.fromkeys(("what", "thing", "remedy"), str), "count": int},
    Switch: {
        "set": Mapping,
        "unset": frozenset,
        "takes_effect": When,
        **dict.fromkeys(("flags", "patches", "memos", "drops", "reloads"), tuple),
        **dict.fromkeys(("latches", "latching_modules", "salts", "platforms", "makes"), tuple),
    },
    Flag: {"module": str, "attribute": str, "value": bool},
    Patch: {"module": str, "owner": _WORDS, "method": str},
    Artifact: {"key": str, "form": str, "data": bytes, "detail": Mapping},
}


#: What the tuples among them hold.
_ELEMENTS: Final[Mapping[type, Mapping[str, type]]] = {
    Entry: {"kernels": str, "mark": int},
    Orphan: {"mark": int},
    Census: {"problems": Problem},
    ClearPlan: {"targets": Target, "skipped": Note, "failed": Note, "remake": Path},
    Target: {"mark": int},
    Outcome: {"skipped": Note, "failed": Note, "remade": Path},
    Foresight: {"going": Target, "skipped": Note, "failed": Note},
    Switch: {
        "unset": str,
        "flags": Flag,
        "patches": Patch,
        "memos": Patch,
        "makes": Path,
        "drops": tuple,
        "reloads": tuple,
        **dict.fromkeys(("latches", "latching_modules", "salts", "platforms"), str),
    },
}
#: The names and values among them.
_WORDED: Final[Mapping[type, tuple[str, ...]]] = {
    Entry: ("versions", "detail"),
    Artifact: ("detail",),
    Switch: ("set",),
}
#: Attributes of :class:`Layer` that a plug-in has. The registry has checked them.
_REQUIRED: Final = ("interface", "name", "title", "scope", "precious", "clearing_needs_room", "forms")
#: Attributes that have a default, which holds where the plug-in sets something else than these kinds.
_OPTIONAL: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("on_network", "among_ranks", "when_closed"), (Hazard, type(None))),
    "failure_mark": (re.Pattern, type(None)),
}
#: What every shell and every system takes for the name of a variable.
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PluginFailed(LayerError):
    """Somebody else's layer raised what no layer may raise, or answered what is no answer."""


class Contained(StoreLayer):
    """A stranger's layer, every call of which ends in an answer of the right kind or in a :class:`LayerError`."""

    def __init__(self, inner: Layer, environment: Environment) -> None:
        super().__init__(environment)
        self._inner = inner
        self._limit = plugin_limit(environment)
        self.__dict__.update({name: getattr(inner, name) for name in _REQUIRED})
        for name, kinds in _OPTIONAL.items():
            value = getattr(inner, name, None)
            is_bytes = isinstance(value, re.Pattern) and not isinstance(value.pattern, str)
            if isinstance(value, kinds) and not is_bytes:
                self.__dict__[name] = value

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            # Standard output is for data; a stranger's remarks are none.
            with redirect_stdout(sys.stderr):
                return question()
        except (LayerError, KeyboardInterrupt, TookTooLong):
            raise
        # A stranger's own may be no Exception: so are a panic of Rust's, and a skip of pytest's.
        except BaseException as error:
            raise PluginFailed(self.name, f"the plug-in failed: {described(error)}") from error

    def _ask_soon(self, question: Callable[[], T]) -> T:
        """Ask what is a matter of the variables alone, and so of no time."""
        try:
            with limited(self._limit):
                return self._ask(question)
        except TookTooLong as error:
            message = f"the plug-in failed: took longer than {self._limit:g} s; {PLUGIN_TIMEOUT} sets how long it may"
            raise PluginFailed(self.name, message) from error

    def _own(self, value: T) -> T:
        """Return what is said for this layer. Raises :class:`TypeError` for what is said for another."""
        layer = getattr(value, "layer", self.name)
        if layer != self.name:
            raise TypeError(f"answered with {type(value).__name__} of the layer {layer!r}")
        return value

    def _is_own(self, member: str) -> bool:
        """Return whether the plug-in has its own version of an optional member.

        If not, the code of :class:`Layer` runs on this guard, so that it asks the plug-in only guarded questions.
        """
        general = Store if hasattr(Store, member) else Layer
        method = self._ask(lambda: getattr(self._inner.store if general is Store else self._inner, member))
        return getattr(method, "__func__", None) is not getattr(general, member)

    def _each(self, question: Callable[[], Iterable[F]], kinds: tuple[type, ...]) -> Iterator[F]:
        things = self._ask(lambda: iter(question()))
        while (thing := self._ask(lambda: self._own(_next(things, kinds)))) is not None:
            yield thing

    # ------------------------------------------------------------------ a layer's questions

    def roots(self) -> tuple[Root, ...]:
        """Ask for the roots."""
        return self._ask_soon(lambda: tuple(_placed(_checked(root, Root)) for root in self._inner.roots()))

    def state(self) -> State:
        """Ask for the state."""
        return self._ask_soon(lambda: _checked(self._inner.state(), State))

    def _each_in(self, root: Root, question: Callable[[], Iterable[C]], kinds: tuple[type, ...]) -> Iterator[C]:
        """Yield what the plug-in lists in a root. Raises :class:`PluginFailed` for a thing outside the root."""
        for thing in self._each(question, kinds):
            self._demand_inside(thing, root)
            yield thing

    def _demand_inside(self, thing: Counted | Target, root: Root) -> None:
        # Files elsewhere may belong to anybody.
        if (stray := _outside(thing, root)) is not None:
            message = f"the plug-in failed: it lists {stray}, which is not in its root"
            raise PluginFailed(self.name, message, root.path)

    def scan(self, root: Root, *, contents: bool = True) -> Iterator[Found]:
        """Ask for what lies in a root."""
        return self._each_in(root, lambda: self._inner.store.scan(root, contents=contents), _FOUND)

    def searched(self, root: Root, selection: Selection) -> Iterator[Found]:
        """Ask for what a selection may match."""
        if not self._is_own("searched"):
            return super().searched(root, selection)
        return self._each_in(root, lambda: self._inner.store.searched(root, selection), _FOUND)

    def counted(self, root: Root) -> Iterator[Counted]:
        """Ask for what there is to count."""
        if not self._is_own("counted"):
            return super().counted(root)
        return self._each_in(root, lambda: self._inner.store.counted(root), (*_FOUND, Bulk))

    def census(self, root: Root) -> Census:
        """Ask for the numbers."""
        if not self._is_own("census"):
            return super().census(root)
        return self._ask(lambda: _checked(self._inner.store.census(root), Census))

    def read(self, root: Root, key: str) -> Artifact | None:
        """Ask for one entry."""
        artifact = self._ask(lambda: self._inner.store.read(root, key))
        return None if artifact is None else self._artifact(root, key, artifact)

    def _artifact(self, root: Root, key: str, answer: Artifact) -> Artifact:
        """Return what was read under a key. Raises :class:`PluginFailed` where it is no artifact of that key."""
        artifact = self._ask(lambda: self._own(_checked(answer, Artifact)))
        if artifact.key != key:
            message = f"the plug-in failed: it answered with {artifact.key!r} for {key!r}"
            raise PluginFailed(self.name, message, root.path)
        return artifact

    def read_many(self, root: Root, keys: Sequence[str]) -> Mapping[str, Artifact | LayerError | OSError]:
        """Ask for several entries; a wrong answer about one of them is the error of that one."""
        if not self._is_own("read_many"):
            return super().read_many(root, keys)
        answers = self._ask(lambda: dict(_checked(self._inner.store.read_many(root, keys), Mapping)))
        return {key: self._one_of_many(root, key, one, frozenset(keys)) for key, one in answers.items()}

    def _one_of_many(
        self, root: Root, key: str, answer: Artifact | LayerError | OSError, asked: Container[str]
    ) -> Artifact | LayerError | OSError:
        if key not in asked:
            message = f"the plug-in failed: it answered for {key!r}, which it was not asked for"
            raise PluginFailed(self.name, message, root.path)
        if isinstance(answer, FAILURES):
            return answer
        try:
            return self._artifact(root, key, answer)
        except LayerError as error:
            return error

    def write(self, root: Root, key: str, artifact: Artifact, *, replace: bool) -> None:
        """Ask to place an entry."""
        self._ask(lambda: self._inner.store.write(root, key, artifact, replace=replace))

    def write_new(self, root: Root, artifacts: Sequence[Artifact]) -> list[bool | LayerError | OSError]:
        """Ask to place several entries."""
        if not self._is_own("write_new"):
            return super().write_new(root, artifacts)
        return self._ask(lambda: _one_each(self._inner.store.write_new(root, artifacts), len(artifacts)))

    def remove(self, root: Root, targets: tuple[Target, ...]) -> Outcome:
        """Ask to remove what a plan lists."""
        return self._ask(lambda: self._own(_checked(self._inner.store.remove(root, targets), Outcome)))

    def is_key(self, key: str) -> bool:
        """Ask whether a text may be a key."""
        return self._ask(lambda: _checked(self._inner.store.is_key(key), bool))

    def held_in(self, root: Root, keys: Sequence[str]) -> Mapping[str, tuple[Path, ...]]:
        """Ask which files hold entries."""
        if not self._is_own("held_in"):
            return super().held_in(root, keys)
        return self._ask(lambda: _paths(self._inner.store.held_in(root, keys)))

    def lock_files(self, root: Root, keys: Iterable[str]) -> Iterable[Path]:
        """Ask which files a change of entries locks."""
        return self._ask(lambda: tuple(_checked(path, Path) for path in self._inner.store.lock_files(root, keys)))

    def foresee_removal(self, root: Root, targets: tuple[Target, ...]) -> Foresight:
        """Ask what removing would do."""
        if not self._is_own("foresee_removal"):
            return super().foresee_removal(root, targets)
        return self._ask(lambda: _checked(self._inner.store.foresee_removal(root, targets), Foresight))

    def foresee_write(self, root: Root, keys: Sequence[str]) -> Mapping[str, LayerError]:
        """Ask what could not be placed."""
        if not self._is_own("foresee_write"):
            return super().foresee_write(root, keys)
        return self._ask(lambda: _errors(self._inner.store.foresee_write(root, keys)))

    def switched(self, *, on: bool) -> Switch:
        """Ask how to turn the layer on or off."""
        return self._ask_soon(lambda: self._own(_checked(self._inner.switched(on=on), Switch)))

    def relocate(self, folder: Path) -> Switch:
        """Ask how to move the layer."""
        return self._ask_soon(lambda: self._own(_checked(self._inner.relocate(folder), Switch)))

    def verify(self, root: Root) -> Iterator[Finding]:
        """Ask what is damaged."""
        for finding in self._each(lambda: self._inner.store.verify(root), (Finding,)):
            self._demand_of_root(finding, root)
            yield finding

    def examine(self, root: Root, *, deep: bool) -> Iterator[Finding | Unverified]:
        """Ask what is damaged, and what was not checked."""
        if not self._is_own("examine"):
            yield from super().examine(root, deep=deep)
            return
        for found in self._each(lambda: self._inner.store.examine(root, deep=deep), (Finding, Unverified)):
            if isinstance(found, Finding):
                self._demand_of_root(found, root)
            yield found

    def _demand_of_root(self, finding: Finding, root: Root) -> None:
        stray = _outside(Problem(finding.root, finding.code, finding.message), root)
        if stray is None and finding.thing is not None:
            stray = _outside(finding.thing, root)
        if stray is not None:
            message = f"the plug-in failed: it finds fault with {stray}, which is not in its root"
            raise PluginFailed(self.name, message, root.path)

    def set_aside(self, root: Root, target: Target, thing: Quarantined) -> str | None:
        """Ask to move something into quarantine."""
        return self._ask(lambda: _checked(self._inner.store.set_aside(root, target, thing), str, type(None)))

    def bring_back(self, root: Root, thing: Quarantined, *, replace: bool) -> None:
        """Ask to move something out of quarantine."""
        self._ask(lambda: self._inner.store.bring_back(root, thing, replace=replace))

    def refresher(self) -> Switch | None:
        """Ask how to store without reading."""
        return self._ask_soon(lambda: self._own(_checked(self._inner.refresher(), Switch, type(None))))

    def marked(
        self, root: Root, mark: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str | None]]:
        """Ask what bears a mark."""
        for thing, found in self._each(lambda: self._inner.store.marked(root, mark, since, known), (tuple,)):
            self._demand_inside(thing, root)
            if thing.key not in known if not found else mark.fullmatch(found.encode()) is None:
                message = f"the plug-in failed: {thing.key!r} does not have the mark {found!r} that it was asked for"
                raise PluginFailed(self.name, message, root.path)
            yield thing, found

    def diagnose(self) -> Iterator[Finding]:
        """Ask what is wrong with the set-up."""
        return self._each(self._inner.diagnose, (Finding,))

    def idle_gate(self, targets: Iterable[Removable]) -> Iterator[tuple[Removable, str | None]]:
        """Ask what to leave alone for now."""
        listed = tuple(targets)
        asked = {(thing.root, thing.key) for thing in listed}
        for thing, reason in self._each(lambda: self._inner.store.idle_gate(listed), (tuple,)):
            if (thing.root, thing.key) not in asked:
                message = f"the plug-in failed: it answered for {thing.key!r}, which it was not asked for"
                raise PluginFailed(self.name, message, thing.root)
            yield thing, reason

    def claims(self, root: Root, parts: tuple[str, ...]) -> bool | None:
        """Ask whether a path is the layer's."""
        return self._ask(lambda: _checked(self._inner.store.claims(root, parts), bool, type(None)))

    def lacking(self) -> tuple[Root, ...]:
        """Ask what running programs lack."""
        return self._ask(lambda: tuple(_placed(_checked(root, Root)) for root in self._inner.lacking()))

    def recover(self, root: Root) -> None:
        """Ask to finish what was interrupted."""
        if self._is_own("recover"):
            self._ask(lambda: self._inner.store.recover(root))

    def plan_everything(self, root: Root) -> ClearPlan | None:
        """Ask for the plan of a whole root."""
        plan = self._ask(lambda: self._own(_checked(self._inner.store.plan_everything(root), ClearPlan, type(None))))
        for target in () if plan is None else plan.targets:
            self._demand_inside(target, root)
        return plan

    def elsewhere(self, environment: Environment) -> Layer:
        """Ask for the same layer in another environment."""
        layer = self._ask(lambda: _checked(self._inner.elsewhere(environment), Layer))
        return Contained(layer, environment)

    def refusals(self) -> Mapping[Ability, str]:
        """Ask what cannot be done; a switch or a move that fails is one of these, and so is everything if asking is."""
        try:
            asked = self._ask_soon(lambda: _able(self._inner.abilities()))
        except LayerError as error:
            return dict.fromkeys(Ability, error.message)
        refused = {ability: reason for ability, reason in asked.items() if reason is not None}
        tries: dict[Ability, Callable[[], object]] = {
            Ability.DISABLE: lambda: (self.switched(on=False), self.switched(on=True)),
            Ability.RELOCATE: lambda: self.relocate(self.environment.temporary),
        }
        failed = {ability: _failure(tries[ability]) for ability in tries.keys() - refused.keys()}
        return refused | {ability: message for ability, message in failed.items() if message is not None}


def _placed(root: Root) -> Root:
    """Return a root that can be one. Raises :class:`TypeError` for a place that nobody could name."""
    if not root.path.is_absolute() or ".." in root.path.parts:
        raise TypeError(f"answered with the root {str(root.path)!r}, which is no absolute path")
    return root


def _outside(thing: Counted | Target, root: Root) -> str | None:
    """Return what is listed, if it is in another place than the root that was asked about."""
    if isinstance(thing, Bulk):
        return None
    place = Path(thing.path) if isinstance(thing, Problem) else thing.root
    if isinstance(thing, Problem):
        return None if root.path in (place, *place.parents) and ".." not in place.parts else str(place)
    key = Path(thing.key)
    inside = place == root.path and not key.is_absolute() and ".." not in key.parts
    return None if inside else f"{thing.key!r} of {place}"


def _one_each(answers: list[bool | LayerError | OSError], count: int) -> list[bool | LayerError | OSError]:
    """Return the answers about ``count`` artifacts. Raises :class:`TypeError` for any other."""
    if not isinstance(answers, list) or len(answers) != count:
        raise TypeError(f"answered with no list of {count} where each artifact is due an answer")
    for answer in answers:
        if not isinstance(answer, (bool, *FAILURES)):
            raise TypeError(f"answered with {type(answer).__name__} where bool is due")
    return answers


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


def _paths(answer: Mapping[str, tuple[Path, ...]]) -> dict[str, tuple[Path, ...]]:
    """Return an answer of paths by key. Raises :class:`TypeError` for any other."""
    found = {_checked(key, str): paths for key, paths in _checked(answer, Mapping).items()}
    if not all(isinstance(paths, tuple) for paths in found.values()):
        raise TypeError("answered with what is no tuple of paths")
    return {key: tuple(_checked(path, Path) for path in paths) for key, paths in found.items()}


def _checked(value: T, *kinds: type) -> T:
    """Return an answer of one of the given kinds whose fields are what they should be.

    Raises :class:`TypeError` for any other.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"answered with {type(value).__name__} where {kinds[0].__name__} is due")
    for name, kind in _FIELDS.get(type(value), {}).items():
        if not isinstance(getattr(value, name), kind):
            raise TypeError(f"{type(value).__name__}.{name} is {type(getattr(value, name)).__name__}")
        _demand_number(value, name, kind)
    for name, kind in _ELEMENTS.get(type(value), {}).items():
        _demand_elements(value, name, kind)
    for name in _WORDED.get(type(value), ()):
        if not all(isinstance(word, str) for pair in getattr(value, name).items() for word in pair):
            raise TypeError(f"{type(value).__name__}.{name} holds what is no str")
    if isinstance(value, Switch):
        _demand_variables(value)
        _demand_parts(value)
    if isinstance(value, tuple) and not _is_gated(value):
        raise TypeError("answered with a tuple that is no entry with a reason")
    return value


def _demand_elements(value: object, name: str, kind: type) -> None:
    """Refuse a tuple with an element of another kind, or with one whose fields are wrong."""
    for element in getattr(value, name) or ():
        if not isinstance(element, kind):
            raise TypeError(f"{type(value).__name__}.{name} holds what is no {kind.__name__}")
        # Of plain types there is nothing more to check, and a tuple has a meaning of its own as an answer.
        if type(element) in _FIELDS:
            _checked(element, kind)


def _demand_number(value: object, name: str, kind: type | tuple[type, ...]) -> None:
    """Refuse a size or count below zero, and a time that is none, which JSON cannot spell."""
    number = getattr(value, name)
    counts = kind in (int, _COUNT)
    if (isinstance(number, float) and not math.isfinite(number)) or (counts and number is not None and number < 0):
        raise TypeError(f"{type(value).__name__}.{name} is {number}")


def _demand_variables(switch: Switch) -> None:
    """Refuse what no shell could set, or would take for a command."""
    for name in (*switch.set, *switch.unset):
        if not _VARIABLE.fullmatch(name):
            raise TypeError(f"answered with the variable {name!r}, which is no name of one")
    for name, content in switch.set.items():
        if "\0" in content:
            raise TypeError(f"answered with a {name} that no variable can hold")


def _demand_parts(switch: Switch) -> None:
    """Refuse a replacement that cannot be called, and anything but a pair where a module and an attribute are due."""
    for patch in (*switch.patches, *switch.memos):
        if not callable(patch.replacement):
            raise TypeError(f"answered with a replacement of {patch.method} that cannot be called")
    for pair in (*switch.drops, *switch.reloads):
        if len(pair) != 2 or not all(isinstance(name, str) for name in pair):  # noqa: PLR2004
            raise TypeError(f"answered with {pair!r} where the names of a module and an attribute are due")


def _able(abilities: Mapping[Ability, str | None]) -> Mapping[Ability, str | None]:
    """Return abilities whose reasons are words. Raises :class:`TypeError` for any other."""
    if not all(isinstance(reason, _WORDS) for reason in abilities.values()):
        raise TypeError("refuses with what is no reason in words")
    return abilities


def _errors(found: Mapping[str, LayerError]) -> Mapping[str, LayerError]:
    """Return what keeps entries from being placed. Raises :class:`TypeError` for what are no errors of a layer."""
    if not all(isinstance(error, LayerError) for error in _checked(found, Mapping).values()):
        raise TypeError("refuses a key with what is no LayerError")
    return found


def _is_gated(pair: tuple[object, ...]) -> bool:
    """Tell whether a tuple is what :meth:`Layer.idle_gate` yields."""
    return len(pair) == 2 and isinstance(pair[0], (Entry, Orphan)) and isinstance(pair[1], (str, type(None)))  # noqa: PLR2004
