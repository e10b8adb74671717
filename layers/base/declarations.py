"""Declarations of a plain layer about its library: its places, its switch, and when it reads its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.facts import Condition, Root, Scope, State, When


class Places(ABC):
    """The places where a library keeps entries."""

    @abstractmethod
    def roots(self, environment: Environment) -> tuple[Root, ...]:
        """Return every place, existing or not; the one the library writes to comes first."""

    @abstractmethod
    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Return the variables that make the library keep everything under another folder."""


@dataclass(frozen=True)
class EnvPath(Places):
    """One folder, named by a variable; a default if the variable is unset or empty."""

    variable: str
    #: Returns the folder and the reason for it.
    default: Callable[[Environment], tuple[Path, str]]

    def roots(self, environment: Environment) -> tuple[Root, ...]:
        """Return the one root."""
        path, source = self.default(environment)
        if named := environment.get(self.variable):
            path, source = environment.absolute(named), self.variable
        return (Root(path, Scope.USER, source),)

    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Return the variable."""
        return {self.variable: str(folder / layer)}


def user_cache(application: str) -> Callable[[Environment], tuple[Path, str]]:
    """Declare the folder of an application in the user's cache folder, by the rule of platformdirs."""
    return partial(user_cache_folder, application=application)


class Read(NamedTuple):
    """The moment when a library reads its variables; later changes have no effect.

    ``libraries`` are beginnings of the file names of shared libraries, ``modules`` names of Python modules.
    """

    when: When
    libraries: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def applied(self, layer: str, put: Mapping[str, str], unset: frozenset[str] = frozenset()) -> facts.Switch:
        """Return the change of variables with the moment when it takes effect."""
        return facts.Switch(
            layer, put, unset, read_at_load=self.libraries, read_at_import=self.modules, takes_effect=self.when
        )


def at_load(*libraries: str) -> Read:
    """Declare variables that are read once, when one of these libraries is loaded."""
    return Read(When.NEXT_START, libraries)


def at_import(*modules: str) -> Read:
    """Declare variables that are read once, when one of these Python modules is imported."""
    return Read(When.NEXT_IMPORT, modules=modules)


def at_once() -> Read:
    """Declare variables that are read whenever the cache is used."""
    return Read(When.NOW)


class EnvSwitch(NamedTuple):
    """A variable with one value that turns a cache off; other values have no effect."""

    variable: str
    off: str
    read: Read

    def state(self, environment: Environment) -> State:
        """Return whether the variable has that value."""
        setting = f"{self.variable}={self.off}"
        if environment.get(self.variable) == self.off:
            return State(Condition.DISABLED, setting)
        return State(Condition.ENABLED, f"on unless {setting}")

    def change(self, layer: str, *, on: bool) -> facts.Switch:
        """Return how to turn the cache on or off."""
        if on:
            return self.read.applied(layer, {}, frozenset({self.variable}))
        return self.read.applied(layer, {self.variable: self.off})
