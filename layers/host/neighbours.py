"""Caches of compiled code that no layer covers: their places and sizes. They are only read.

A table holds the rule of each library, with its places in the order in which the library looks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachectl.layers.base.environment import Environment, user_name

#: Limit on the files counted in one place.
MOST: Final = 200_000
_LOGINS: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One place of one library; ``files`` and ``bytes`` are ``None`` if the count was not finished."""

    name: str
    path: Path
    source: str
    exists: bool
    files: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """A library, the variable that moves its cache, and its default places, several if releases differ."""

    name: str
    variable: str
    defaults: tuple[tuple[str, Callable[[Environment], Path | None]], ...] = ()


def _below_home(*parts: str) -> Callable[[Environment], Path | None]:
    return lambda environment: environment.home_folder.joinpath(*parts)


def _below(variable: str, *parts: str) -> Callable[[Environment], Path | None]:
    def place(environment: Environment) -> Path | None:
        value = environment.get(variable)
        return environment.absolute(value).joinpath(*parts) if value else None

    return place


def _triton(environment: Environment) -> Path | None:
    home = environment.get("TRITON_HOME")
    return None if home else environment.home_folder / ".triton" / "cache"


def _numba(environment: Environment) -> Path | None:
    xdg = environment.get("XDG_CACHE_HOME")
    return environment.absolute(xdg) / "numba" if xdg else environment.home_folder / ".cache" / "numba"


def _temporary(pattern: str) -> Callable[[Environment], Path | None]:
    return lambda environment: environment.temporary / pattern.format(uid=_user(), login=_login(environment))


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _login(environment: Environment) -> str:
    name = next(filter(None, map(environment.get, _LOGINS)), None) or user_name(_user())
    return re.sub(r'[\\/:*?"<>|]', "_", name)


_RULES: Final = (
    # triton/knobs.py (cache_knobs): TRITON_CACHE_DIR, else TRITON_HOME or the home, with .triton/cache behind it.
    _Rule(
        "Triton",
        "TRITON_CACHE_DIR",
        (("TRITON_HOME", _below("TRITON_HOME", ".triton", "cache")), ("default", _triton)),
    ),
    # cupy/cuda/compiler.py (get_cache_dir).
    _Rule("CuPy", "CUPY_CACHE_DIR", (("default", _below_home(".cupy", "kernel_cache")),)),
    # numba/core/caching.py: beside the source, in __pycache__, and here where that is not writable.
    _Rule("Numba", "NUMBA_CACHE_DIR", (("default where __pycache__ is closed", _numba),)),
    # pyop2/configuration.py (cache_dir); Firedrake's own environment names a folder of it.
    _Rule(
        "PyOP2",
        "PYOP2_CACHE_DIR",
        (
            ("VIRTUAL_ENV", _below("VIRTUAL_ENV", ".cache", "pyop2")),
            ("default", _temporary("pyop2-cache-uid{uid}")),
        ),
    ),
    # firedrake/tsfc_interface.py (TSFCKernel._cachedir).
    _Rule(
        "TSFC",
        "FIREDRAKE_TSFC_KERNEL_CACHE_DIR",
        (
            ("VIRTUAL_ENV", _below("VIRTUAL_ENV", ".cache", "tsfc")),
            ("default", _temporary("firedrake-tsfc-kernel-cache-uid{uid}")),
        ),
    ),
    # torch/_inductor/runtime/cache_dir_utils.py (default_cache_dir).
    _Rule("torch inductor", "TORCHINDUCTOR_CACHE_DIR", (("default", _temporary("torchinductor_{login}")),)),
    # jax/_src/config.py (jax_compilation_cache_dir): none until one is named.
    _Rule("JAX", "JAX_COMPILATION_CACHE_DIR"),
)


def neighbours(environment: Environment, *, most: int = MOST) -> list[Neighbour]:
    """Return every place that a variable names, and the default places that exist.

    If no variable is set, the first default of a library is listed even if it does not exist.
    """
    return [_measured(*place, most=most) for rule in _RULES for place in _places(rule, environment)]


def _places(rule: _Rule, environment: Environment) -> Iterator[tuple[str, Path, str]]:
    value = environment.get(rule.variable)
    if value:
        # A URL of another machine is not a path here.
        if "://" not in value:
            yield rule.name, environment.expand(value), rule.variable
        return
    known = [(source, place(environment)) for source, place in rule.defaults]
    there = [(source, path) for source, path in known if path is not None]
    existing = [(source, path) for source, path in there if path.is_dir()]
    for source, path in existing or there[-1:]:
        yield rule.name, path, source


def _measured(name: str, path: Path, source: str, *, most: int) -> Neighbour:
    if not path.is_dir():
        return Neighbour(name, path, source, exists=path.exists(), files=0, bytes=0)
    files = total = 0
    try:
        for status in _statuses(path):
            files += 1
            total += status.st_size
            if files > most:
                return Neighbour(name, path, source, exists=True, files=None, bytes=None)
    except OSError:
        return Neighbour(name, path, source, exists=True, files=None, bytes=None)
    return Neighbour(name, path, source, exists=True, files=files, bytes=total)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every plain file below a folder; links are not followed, and vanished files are skipped."""
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for one in found:
                if one.is_dir(follow_symlinks=False):
                    waiting.append(one.path)
                elif one.is_file(follow_symlinks=False):
                    try:
                        yield one.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
