"""What a layer declares about its library: its places, its variables, and when it reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.errors import Refused
from cachectl.layers.core.finding import Severity
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.core.switch import NEXT_IMPORT, NOW, Switch

#: How a library treats an empty or relative value: as unset, as no cache, or as below the working directory or ``/``.
UNSET, NOWHERE, HERE, TOP = "unset", "nowhere", "here", "top"


class Rule(NamedTuple):
    """A variable that names a folder, and the path that the library appends to it.

    Without a variable, the folder is the account's home. ``source`` is why the place is used, by default the variable.
    """

    variable: str
    suffix: str = ""
    empty: str = UNSET
    relative: str = HERE
    source: str = ""


class Family(NamedTuple):
    """The pattern of a product's variables about its cache, and the others that releases read, separated by blanks.

    Only names that match, or that begin like a known one and have a few wrong letters, are reported as misspelt or
    invented. The layers of one product share one pattern.
    """

    pattern: str
    read: str = ""


class Places(NamedTuple):
    """The places of a library by platform: the first rule whose variable is set decides, else the default.

    Without rules, only the ``variable`` that moves the cache counts. Unless given, macOS has the rules of Linux.
    """

    variable: str
    linux: tuple[Rule, ...] | None = None
    windows: tuple[Rule, ...] = ()
    macos: tuple[Rule, ...] | None = None
    #: Returns the default folder and the reason for it.
    default: Callable[[Environment], tuple[Path, str]] | None = None
    #: Returns the roots of a library whose places do not follow such rules.
    find: Callable[[Environment], tuple[Root, ...]] | None = None
    #: The name of the layer's folder when the variable moves it; by default the layer's name.
    below: str | None = None
    #: Why the cache cannot be moved.
    unmoved: str | None = None
    #: Whether the library itself expands ``~``.
    expands_home: bool = False

    def rules(self, platform: str) -> tuple[Rule, ...]:
        """Return the rules of a platform."""
        if self.linux is None:
            return (Rule(self.variable),)
        on_macos = self.linux if self.macos is None else self.macos
        return {"win32": self.windows, "darwin": on_macos}.get(platform, self.linux)

    def deciding(self, environment: Environment) -> tuple[Rule, str, str | None] | None:
        """Return the rule that decides, its value, and how the library treats the value if it is not absolute."""
        is_absolute = PureWindowsPath if environment.platform == "win32" else PurePosixPath
        for rule in self.rules(environment.platform):
            value = environment.get(rule.variable) if rule.variable else str(environment.home)
            if value is not None:
                odd = rule.relative if value else rule.empty
                if odd != UNSET or is_absolute(value).is_absolute():
                    return rule, value, None if is_absolute(value).is_absolute() else odd
        return None

    def roots(self, environment: Environment) -> tuple[Root, ...]:
        """Return every place, existing or not, starting with the one that the library writes to."""
        if self.find is not None:
            return self.find(environment)
        place = self.place(environment)
        return () if place is None else (Root(place[0], Scope.USER, place[1]),)

    def place(self, environment: Environment) -> tuple[Path, str] | None:
        """Return the folder and the reason for it; ``None`` if there is none."""
        decided = self.deciding(environment)
        if decided is None:
            return None if self.default is None else self.default(environment)
        rule, value, odd = decided
        if odd == NOWHERE:
            return None
        folder = Path("/") if odd == TOP else Path(value) if odd is None else environment.absolute(value)
        return folder / rule.suffix, rule.source or rule.variable

    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Return the variables that move the whole cache below a folder. Raises :class:`Refused` if none does."""
        if self.unmoved is not None:
            raise Refused(layer, f"cannot relocate: {self.unmoved}", folder)
        return {self.variable: str(folder / (self.below or layer))}


def user_cache(application: str) -> Callable[[Environment], tuple[Path, str]]:
    """Declare an application's folder in the user's cache folder, by the rule of platformdirs."""
    return partial(user_cache_folder, application=application)


def at_load(*libraries: str) -> Switch:
    """Declare variables that are read once, when a library whose file name has one of these prefixes is loaded."""
    return Switch("", read_at_load=libraries)


def at_import(*modules: str) -> Switch:
    """Declare variables that are read once, when one of these Python modules is imported."""
    return Switch("", read_at_import=modules, takes_effect=NEXT_IMPORT)


def at_once() -> Switch:
    """Declare variables that are read whenever the cache is used."""
    return Switch("", takes_effect=NOW)


class EnvSwitch(NamedTuple):
    """A variable, and the effect of its values on a cache.

    ``off`` is the pattern of the values that switch the cache off on purpose, ``fine`` that of the other values that
    are understood. Any other value has an unexpected ``outcome``, as serious as ``severity`` says.
    """

    variable: str
    off: str
    fine: str = ".*"
    severity: Severity = Severity.HARMLESS
    outcome: str = ""
    #: The command that corrects the value; by default ``unset``.
    fix: str | None = None
    #: What is switched off, if not the layer.
    what: str | None = None
    #: Whether the values with the outcome switch the layer off too.
    disables: bool = False
    #: A switch that only says when the library reads the variable.
    read: Switch = at_once()
    #: A value that switches the layer off; not needed if ``off`` is a single value.
    value: str | None = None
    #: Variables of newer releases with the same values, which switch off what this one leaves on.
    also: tuple[str, ...] = ()

    @property
    def off_value(self) -> str:
        """A value that switches the layer off."""
        return self.off if self.value is None else self.value

    def is_off(self, value: str | None) -> bool:
        """Return whether a value switches the cache off on purpose."""
        return value is not None and re.fullmatch(self.off, value, re.IGNORECASE | re.ASCII) is not None

    def is_fine(self, value: str) -> bool:
        """Return whether a value that does not switch the cache off is understood."""
        return re.fullmatch(self.fine, value, re.IGNORECASE | re.ASCII | re.DOTALL) is not None

    def change(self, layer: str, *, on: bool) -> Switch:
        """Return how to turn the cache on or off. Raises :class:`Refused` if no value is known that turns it off."""
        if on:
            return self.read._replace(layer=layer, unset=frozenset({self.variable, *self.also}))
        if not self.is_off(self.off_value):
            raise Refused(layer, f"cannot disable: its switch declares no value that matches {self.off!r}")
        return self.read._replace(layer=layer, set=dict.fromkeys((self.variable, *self.also), self.off_value))
