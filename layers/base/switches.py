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
from cachectl.layers.base.lazy import regex

_TRUE: Final = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE: Final = frozenset({"n", "no", "f", "false", "off", "0"})
#: The first releases that read the value of their variables.
_BOOLEAN_SINCE: Final = {"loopy": (2025, 1), "pyopencl": (2024, 2)}
#: A number as ``atoll`` reads it.
_NUMBER: Final = regex(r"\s*[+-]?\d{1,18}", re.ASCII)
_PLAIN_NUMBER: Final = regex(r"\s*[+-]?\d+\s*", re.ASCII)
#: The part of a limit above which a library is about to drop entries.
_NEARLY: Final = 0.9


def off(layer: Layer, variable: str, what: str | None = None) -> facts.Finding:
    """Return the finding that a variable switches a layer off, or ``what`` of it, on purpose."""
    message = f"{variable}={layer.environment.get(variable)} switches {what or layer.title} off"
    return _finding(layer, facts.Severity.RECOMPILES, "off", message, f"unset {variable}")


def misread(
    layer: Layer, variable: str, severity: facts.Severity, outcome: str, fix: str | None = None
) -> facts.Finding:
    """Return the finding that a library does not understand a value, or not as it is probably meant."""
    message = f"{variable}={layer.environment.get(variable)!r} {outcome}"
    return _finding(layer, severity, "variable", message, fix or f"unset {variable}")


def _finding(layer: Layer, severity: facts.Severity, code: str, message: str, fix: str) -> facts.Finding:
    return facts.Finding(layer.name, first_place(layer), None, severity, code, message, fix)


def first_place(layer: Layer) -> Path:
    """Return the root to name in a finding about a layer as a whole."""
    return next((root.path for root in layer.roots()), Path("*"))


def diagnosed(layer: Layer, distribution: str, variables: tuple[str, ...]) -> Iterator[facts.Finding]:
    """Yield how variables switch a layer off that are read with ``pytools.strtobool`` at import."""
    version = layer.environment.installed(distribution)
    is_older = (environment.release_of(version) or (9999,)) < _BOOLEAN_SINCE.get(distribution, ())
    for variable in variables:
        value = layer.environment.get(variable)
        if value is None:
            continue
        if value.lower() in _TRUE:
            yield off(layer, variable)
        elif is_older:
            outcome = f"switches {layer.title} off all the same: {distribution} {version} asks only whether it is set"
            yield misread(layer, variable, facts.Severity.RECOMPILES, outcome)
        elif value.lower() not in _FALSE:
            outcome = f"is not a boolean: import {distribution} raises ValueError"
            yield misread(layer, variable, facts.Severity.FAILS, outcome)


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


def leading_number(value: str) -> int:
    """Read a number as ``atoll`` does: ``1G`` is one, and a text without a leading number is 0."""
    return int(match[0]) if (match := _NUMBER.match(value)) else 0


def is_number(value: str) -> bool:
    """Return whether a text is a number and nothing else."""
    return _PLAIN_NUMBER.fullmatch(value) is not None


def nearly_full(
    layer: Layer, held: int, limit: int, message: str, fix: str, *, root: Path | None = None
) -> Iterator[facts.Finding]:
    """Yield a finding if so many bytes are close to the limit, above which the library drops entries."""
    if held >= _NEARLY * limit:
        place = first_place(layer) if root is None else root
        yield facts.Finding(layer.name, place, None, facts.Severity.RECOMPILES, "cap", message, fix)
