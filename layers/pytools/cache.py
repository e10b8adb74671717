"""The layer ``pytools``: persistent dictionaries of sumpy, pytato and user code.

It is the base of ``loopy`` and ``pyopencl-invoker``, whose dictionaries have identifiers that begin with their names.

Source: ``pytools/persistent_dict.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment, is_common_cache_home, user_cache_folder
from cachectl.layers.base.facts import Condition, Hazard, Root, Scope, Severity, State, When
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import Lookups, Portability
from cachectl.layers.base.switches import misread, off, relative_cache_home, strtobool, switched_off
from cachectl.layers.pytools.dictionaries import Dictionaries
from cachectl.layers.pytools.parts import DictionaryLookups, DictionaryPortability

#: Makes a replacement for a method, given which identifiers belong to the layer.


class PytoolsDictionaries(Layer):
    """Persistent dictionaries that belong to neither loopy nor PyOpenCL."""

    name = "pytools"
    title = "other pytools persistent dictionaries"
    distributions: ClassVar[tuple[str, ...]] = ("pytools",)
    reveals: ClassVar[str | None] = "whatever the programs keep in their dictionaries"
    #: Modules that open the layer's dictionaries when they are imported.
    opened_by: ClassVar[tuple[str, ...]] = ()
    on_network = Hazard(
        Severity.RISKS,
        "the locks of sqlite may not hold there, so programs of several nodes may stall, or damage a dictionary",
    )
    among_ranks = Hazard(Severity.HARMLESS, "sqlite lets one of them write at a time, and the others wait")
    when_closed = Hazard(Severity.FAILS, "no dictionary can be made or extended, and programs that try fail")
    # Dictionaries of loopy and PyOpenCL belong to other layers.
    store = Dictionaries("pytools-pdict", lambda identifier: not identifier.startswith(("loopy-", "pyopencl-")))

    @property
    def portability(self) -> Portability:
        """The facts that decide whether a program elsewhere can hit an entry."""
        return DictionaryPortability()

    @property
    def lookups(self) -> Lookups:
        """How the lookups and stores of a run are observed."""
        return DictionaryLookups(self.store.owns_identifier)

    def roots(self) -> tuple[Root, ...]:
        """Return the pytools folder; pytools reads the environment whenever it opens a dictionary."""
        return user_cache_roots(self.environment, "pytools")

    def state(self) -> State:
        """Return that pytools has no switch, but sumpy has one."""
        if self.environment.get("SUMPY_NO_CACHE") is not None:
            return State(Condition.ENABLED, "off for sumpy alone (SUMPY_NO_CACHE is set, its value is not read)")
        return self._presence("pytools", "pytools has no switch")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with sumpy's variables: sumpy checks only whether they are set."""
        for variable in ("SUMPY_NO_CACHE", "CG_NO_CACHE"):
            value = self.environment.get(variable)
            if value is None or (variable == "CG_NO_CACHE" and self.environment.installed("sumpy") is None):
                continue
            if strtobool(value):
                yield off(self, variable, "sumpy's dictionaries")
            else:
                outcome = "switches sumpy's dictionaries off all the same: sumpy asks only whether it is set"
                yield misread(self, variable, Severity.RECOMPILES, outcome)
        yield from relative_cache_home(self)

    def switched(self, *, on: bool) -> facts.Switch:
        """Return sumpy's variable, and patches that replace the switch that pytools lacks in this process."""
        if on:
            return facts.Switch(self.name, unset=frozenset({"SUMPY_NO_CACHE"}), takes_effect=When.NEXT_IMPORT)
        replacements = {"fetch": _missing, "store": _forgetting, "store_if_not_present": _forgetting}
        patches = tuple(
            facts.Patch("pytools.persistent_dict", owner, method, partial(replacement, self.store.owns_identifier))
            for owner in ("PersistentDict", "WriteOncePersistentDict")
            for method, replacement in replacements.items()
        )
        return facts.Switch(self.name, {"SUMPY_NO_CACHE": "1"}, patches=patches, takes_effect=When.NOW)

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the user cache folder; open dictionaries stay where they are."""
        return relocate_user_cache(self, folder, self.opened_by)

    def judged(self, distribution: str, variables: tuple[str, ...]) -> State:
        """Return the state by the variables that switch a library's dictionaries off, then by what is installed."""
        off = switched_off(self.environment, distribution, variables)
        return off or self._presence(distribution, "not switched off by " + " or ".join(variables))

    def _presence(self, distribution: str, why: str) -> State:
        root = self.roots()[0]
        if self.environment.installed(distribution) is None and next(self.store.dictionaries(root), None) is None:
            return State(Condition.ABSENT, f"{distribution} is not installed here and has left no dictionary")
        return State(Condition.ENABLED, why)


def user_cache_roots(environment: Environment, application: str) -> tuple[Root, ...]:
    """Return the places of an application in the user's cache folder, that of the environment's own Python first.

    There are several only if releases of platformdirs disagree about the environment, and known Pythons differ in it.
    """
    path, source = user_cache_folder(environment, application)
    roots = {path: Root(path, Scope.USER, source)}
    if not is_common_cache_home(environment):
        from cachectl.layers.host.pythons import pythons_of

        for python in pythons_of(environment)[1:]:
            if python.present and python.installed("platformdirs") is not None:
                path, source = user_cache_folder(replace(environment, installed=python.installed), application)
                roots.setdefault(path, Root(path, Scope.USER, f"{source}, of {python.path}"))
    return tuple(roots.values())


def relocate_user_cache(layer: Layer, folder: Path, opened_by: tuple[str, ...] = ()) -> facts.Switch:
    """Return the variable that moves the user cache folder, which pytools and PyOpenCL follow."""
    variable = "WIN_PD_OVERRIDE_LOCAL_APPDATA" if layer.environment.platform == "win32" else "XDG_CACHE_HOME"
    return facts.Switch(
        layer.name, {variable: str(folder / "xdg")}, read_at_import=opened_by, takes_effect=When.NEXT_IMPORT
    )


def _missing(owns_identifier: Callable[[str], bool], fetch: Callable[..., object]) -> Callable[..., object]:
    """Return a ``fetch`` that misses in the dictionaries that ``owns_identifier`` accepts, and works in others."""

    @wraps(fetch)
    def fetch_elsewhere(dictionary: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401 - pytools'
        if not owns_identifier(dictionary.identifier):
            return fetch(dictionary, *arguments, **options)
        from pytools.persistent_dict import NoSuchEntryError

        raise NoSuchEntryError(*arguments[:1])

    return fetch_elsewhere


def _forgetting(owns_identifier: Callable[[str], bool], store: Callable[..., object]) -> Callable[..., object]:
    """Return a ``store`` that does nothing in the dictionaries that ``owns_identifier`` accepts."""

    @wraps(store)
    def store_elsewhere(dictionary: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401
        return None if owns_identifier(dictionary.identifier) else store(dictionary, *arguments, **options)

    return store_elsewhere
