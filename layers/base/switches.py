"""Switches of layers: variables, read as each library reads them, and replacements for memoised methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from cachectl.layers.base import environment, facts
from cachectl.layers.base.layer import Layer

#: The first releases that read the value of their variables.
_BOOLEAN_SINCE: Final = {"loopy": (2025, 1), "pyopencl": (2024, 2)}


def off(layer: Layer, variable: str, what: str | None = None) -> facts.Finding:
    """Return the finding that a variable switches a layer off, or ``what`` of it, on purpose."""
    message = f"{variable}={layer.environment.get(variable)} switches {what or layer.title} off"
    where, severity = first_place(layer), facts.Severity.RECOMPILES
    return facts.Finding(layer.name, where, None, severity, "off", message, f"unset {variable}")


def misread(
    layer: Layer, variable: str, severity: facts.Severity, outcome: str, fix: str | None = None
) -> facts.Finding:
    """Return the finding that a library does not understand a value, or not as it is probably meant."""
    message, fix = f"{variable}={layer.environment.get(variable)!r} {outcome}", fix or f"unset {variable}"
    return facts.Finding(layer.name, first_place(layer), None, severity, "variable", message, fix)


def first_place(layer: Layer) -> Path:
    """Return the root to name in a finding about a layer as a whole."""
    return next((root.path for root in layer.roots()), Path("*"))


def diagnosed(layer: Layer, distribution: str, variables: tuple[str, ...]) -> Iterator[facts.Finding]:
    """Yield how variables switch a layer off that are read with ``pytools.strtobool`` at import."""
    version = layer.environment.installed(distribution)
    fine, severity = "n|no|f|false|off|0", facts.Severity.FAILS
    outcome = f"is not a boolean: import {distribution} raises ValueError"
    if (environment.release_of(version) or (9999,)) < _BOOLEAN_SINCE.get(distribution, ()):
        fine, severity = "(?!)", facts.Severity.RECOMPILES
        outcome = f"switches {layer.title} off all the same: {distribution} {version} asks only whether it is set"
    settings = (Setting(variable, "y|yes|t|true|on|1", fine, severity, outcome) for variable in variables)
    yield from (finding for _, finding in setting_faults(layer, settings))


def relative_cache_home(layer: Layer) -> Iterator[facts.Finding]:
    """Yield a finding if ``XDG_CACHE_HOME`` is not absolute: pytools and PyOpenCL ignore it, or resolve it anywhere."""
    value = layer.environment.get("XDG_CACHE_HOME")
    if layer.environment.platform == "linux" and value and not Path(value).is_absolute():
        outcome = "is not absolute: pytools and PyOpenCL ignore it, and use ~/.cache"
        if layer.environment.follows_relative_cache_home:
            outcome = "is not absolute: pytools and PyOpenCL make a cache in every folder that a program starts in"
        yield misread(layer, "XDG_CACHE_HOME", facts.Severity.HARMLESS, outcome)


def forgetting(method: Callable[..., object]) -> Callable[..., object]:
    """Return a replacement for a method that pytools' ``memoize_method`` wraps: every object starts with no memory.

    What an object remembers meanwhile goes with the replacement. What it remembered before is kept for the original.
    """
    from inspect import unwrap

    bare = unwrap(method)
    memo: WeakKeyDictionary[Any, dict[object, object]] = WeakKeyDictionary()

    @wraps(method)
    def remember_again(owner: object, *arguments: object, **options: object) -> object:
        remembered = memo.setdefault(owner, {})
        key = (arguments, tuple(sorted(options.items())))
        if key not in remembered:
            remembered[key] = bare(owner, *arguments, **options)
        return remembered[key]

    return remember_again


class Setting(NamedTuple):
    """A variable and its values: patterns of those that switch ``off`` on purpose, and of those that are ``fine``.

    Every other value has an outcome that few expect.
    """

    variable: str
    off: str
    fine: str
    severity: facts.Severity
    outcome: str
    #: The command that corrects it; unset by default.
    fix: str | None = None
    #: What is switched off, if not the layer.
    what: str | None = None
    #: Whether the other values switch the layer off too.
    disables: bool = False


#: A problem, and the condition of the cache that follows from it, if any.
Fault = tuple[facts.Condition | None, facts.Finding]


def setting_faults(layer: Layer, settings: Iterable[Setting]) -> Iterator[Fault]:
    """Yield what is wrong with variables that are set."""
    for setting in settings:
        if (value := layer.environment.get(setting.variable)) is None:
            continue
        if re.fullmatch(setting.off, value, re.IGNORECASE | re.ASCII):
            yield facts.Condition.DISABLED, off(layer, setting.variable, setting.what)
        elif not re.fullmatch(setting.fine, value, re.IGNORECASE | re.ASCII | re.DOTALL):
            found = misread(layer, setting.variable, setting.severity, setting.outcome, setting.fix)
            yield facts.Condition.DISABLED if setting.disables else None, found
