"""Declarations of a plain layer about its library: its places, its switch, and when it reads its variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from cachectl.layers.base import facts
from cachectl.layers.base.environment import Environment, user_cache_folder


class Places(ABC):
    """The places where a library keeps entries."""

    #: Moves the cache to a folder.
    variable: str

    @abstractmethod
    def roots(self, environment: Environment) -> tuple[facts.Root, ...]:
        """Return every place, existing or not; the one the library writes to comes first."""

    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Return the variables that make the library keep everything under another folder."""
        return {self.variable: str(folder / layer)}


@dataclass(frozen=True)
class EnvPath(Places):
    """One folder, named by a variable; a default if the variable is unset or empty."""

    variable: str
    #: Returns the folder and the reason for it.
    default: Callable[[Environment], tuple[Path, str]]

    def roots(self, environment: Environment) -> tuple[facts.Root, ...]:
        """Return the one folder."""
        named = environment.get(self.variable)
        path, source = (environment.absolute(named), self.variable) if named else self.default(environment)
        return (facts.Root(path, facts.Scope.USER, source),)


def user_cache(application: str) -> Callable[[Environment], tuple[Path, str]]:
    """Declare the folder of an application in the user's cache folder, by the rule of platformdirs."""
    return partial(user_cache_folder, application=application)


def at_load(*libraries: str) -> facts.Switch:
    """Declare variables that are read once, when a library is loaded whose file name begins with one of these."""
    return facts.Switch("", read_at_load=libraries)


def at_import(*modules: str) -> facts.Switch:
    """Declare variables that are read once, when one of these Python modules is imported."""
    return facts.Switch("", read_at_import=modules, takes_effect=facts.When.NEXT_IMPORT)


def at_once() -> facts.Switch:
    """Declare variables that are read whenever the cache is used."""
    return facts.Switch("", takes_effect=facts.When.NOW)


class EnvSwitch(NamedTuple):
    """A variable with one value that turns a cache off; other values have no effect."""

    variable: str
    off: str
    #: A switch that says only when the library reads the variable.
    read: facts.Switch

    def state(self, environment: Environment) -> facts.State:
        """Return whether the variable has that value."""
        setting = f"{self.variable}={self.off}"
        if environment.get(self.variable) == self.off:
            return facts.State(facts.Condition.DISABLED, setting)
        return facts.State(facts.Condition.ENABLED, f"on unless {setting}")

    def change(self, layer: str, *, on: bool) -> facts.Switch:
        """Return how to turn the cache on or off."""
        if on:
            return replace(self.read, layer=layer, unset=frozenset({self.variable}))
        return replace(self.read, layer=layer, set={self.variable: self.off})


class Odd(Enum):
    """What a library makes of an empty or a relative value."""

    UNSET = "as if the variable were not set"
    NOWHERE = "there is no cache"
    HERE = "from the working folder"
    TOP = "from the top of the file system"


class Rule(NamedTuple):
    """A variable that names a folder, and the part of the path that the library appends to it.

    Without a variable it is the home of the account. ``source`` is the reason for the place, the variable if empty.
    """

    variable: str
    suffix: str = ""
    empty: Odd = Odd.UNSET
    relative: Odd = Odd.HERE
    source: str = ""


@dataclass(frozen=True)
class Rules(Places):
    """The places of a library by platform: the first rule whose variable is set decides.

    The rules for macOS are those for Linux unless they are given.
    """

    variable: str
    linux: tuple[Rule, ...]
    windows: tuple[Rule, ...] = ()
    macos: tuple[Rule, ...] | None = None

    def rules(self, platform: str) -> tuple[Rule, ...]:
        """Return the rules of a platform."""
        on_macos = self.linux if self.macos is None else self.macos
        return {"win32": self.windows, "darwin": on_macos}.get(platform, self.linux)

    def deciding(self, environment: Environment) -> tuple[Rule, str, Odd | None] | None:
        """Return the rule that decides, its value, and what the library makes of the value if it is not absolute."""
        is_absolute = PureWindowsPath if environment.platform == "win32" else PurePosixPath
        for rule in self.rules(environment.platform):
            value = environment.get(rule.variable) if rule.variable else str(environment.home)
            if value is not None:
                odd = rule.relative if value else rule.empty
                if odd is not Odd.UNSET or is_absolute(value).is_absolute():
                    return rule, value, None if is_absolute(value).is_absolute() else odd
        return None

    def roots(self, environment: Environment) -> tuple[facts.Root, ...]:
        """Return the one folder, if there is one."""
        place = self.place(environment)
        return () if place is None else (facts.Root(place[0], facts.Scope.USER, place[1]),)

    def place(self, environment: Environment) -> tuple[Path, str] | None:
        """Return the folder and the reason for it; ``None`` if there is none."""
        rule, value, odd = self.deciding(environment) or (None, "", Odd.NOWHERE)
        if rule is None or odd is Odd.NOWHERE:
            return None
        folder = Path("/") if odd is Odd.TOP else Path(value) if odd is None else environment.absolute(value)
        return folder / rule.suffix, rule.source or rule.variable
