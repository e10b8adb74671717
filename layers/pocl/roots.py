"""Where PoCL keeps its cache, by the variables of a program, and which running programs use a root.

Sources: ``lib/CL/pocl_cache.c`` (places), ``lib/CL/devices/devices.c`` (when the variables are read).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Root, Scope
from cachectl.layers.host.processes import finds, first_variables, maps_below, using

LIBRARIES: Final = ("libpocl",)
_NO_HOME: Final = "default (HOME is not set)"


def roots_in(environment: Environment) -> tuple[Root, ...]:
    """Resolve as PoCL does when its first device is opened.

    ``POCL_CACHE_DIR`` is used as it stands, with the cache on or off; every other rule appends a leaf for each.
    """
    named = environment.get("POCL_CACHE_DIR")
    if named is not None:
        return (Root(environment.absolute(named), Scope.USER, "POCL_CACHE_DIR", "kcache"),) if named else ()
    if environment.platform == "win32":
        return _windows_roots(environment)
    xdg, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
    if xdg:
        base, source = environment.absolute(xdg) / "pocl", "XDG_CACHE_HOME"
    elif home is not None:
        base, source = environment.absolute(home + "/.cache/pocl"), "default (HOME)"
    else:
        base, source = Path("/tmp/pocl"), _NO_HOME  # noqa: S108 - PoCL's own rule
    return tuple(Root(base / leaf, Scope.USER, source, leaf) for leaf in ("kcache", "uncached"))


def _windows_roots(environment: Environment) -> tuple[Root, ...]:
    for variable in ("LOCALAPPDATA", "TEMP"):
        value = environment.get(variable)
        if value:
            return (Root(Path(value, "pocl"), Scope.USER, variable, "kcache"),)
    return ()


def switched_on(environment: Environment) -> bool | None:
    """Return whether the variable switches the cache on: only a value that begins with 1 does; ``None`` if unset."""
    value = environment.get("POCL_KERNEL_CACHE")
    return None if value is None else value.startswith("1")


def of_program(number: int, environment: Environment) -> Environment | None:
    """Return the environment a program was started with; ``None`` if it is unknown.

    Its paths that are not absolute stay so: its working folder at that time is unknown.
    """
    variables = first_variables(number, processes=environment.processes)
    return None if not variables else replace(environment, variables=variables, cwd=Path())


def users_of(root: Path, environment: Environment) -> tuple[int, ...] | None:
    """Return the ids of processes with PoCL loaded whose root this is, or may be; ``None`` if they are unknown."""
    users = using(LIBRARIES, processes=environment.processes)
    return None if users is None else tuple(number for number in users if _may_use(number, root, environment))


def _may_use(number: int, root: Path, environment: Environment) -> bool:
    """Return whether a program's root is this one, by its first variables or its mapped files, or is unknown.

    It is unknown for this very process, whose variables change, and where the variables name no absolute folder.
    """
    processes, program = environment.processes, of_program(number, environment)
    if number == os.getpid() or program is None:
        return True
    roots = roots_in(program)
    if not roots or not all(one.path.is_absolute() and one.source != _NO_HOME for one in roots):
        return True
    try:
        return any(finds(number, one.path, root, processes=processes) for one in roots) or maps_below(
            number, root, processes=processes
        )
    except OSError:
        return True
