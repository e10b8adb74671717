"""Settings: the config files, the variables ``CACHECTL_*``, and which of them counts.

A setting comes from an option, else from a variable, else from the user's file, else from a site's file. ``max-size``
in the table ``[prune.pocl]`` has the key ``prune.pocl.max-size`` and the variable ``CACHECTL_PRUNE_POCL_MAX_SIZE``.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.environment import CONFIG_VARIABLE, SETTING_PREFIX, config_paths
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.selection import parse_age, parse_size
from cachectl.layers.base.texts import printable

if TYPE_CHECKING:
    from cachectl.clearing.limits import Limits
    from cachectl.layers.base.environment import Environment

T = TypeVar("T")
Key = tuple[str, ...]
Value = str | int | float | bool | tuple[str, ...] | None

#: Larger than any config file, in bytes.
_LARGEST: Final = 1 << 16
_ON: Final = ("true", "yes", "1")
_OFF: Final = ("false", "no", "0")


class BadConfig(BadRequest):
    """A wrong key or value; the text begins with file and line, or with the variable."""


class ConfigRefused(CachectlError):
    """A config file that cannot be read, or that another user could have written."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file that was read: its path, whose it is (``user``, ``site`` or ``named``), and its content."""

    path: Path
    origin: str
    text: str
    tables: Mapping[str, Any]

    def line(self, key: Key) -> int:
        """Return the line on which a key begins."""
        return _lines(self.text)[key]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, and where: in a variable, in a file, or nowhere (the default of an option)."""

    keys: Key
    value: Value
    variable: str | None = None
    file: ConfigFile | None = None
    as_json: ClassVar[AsJson] = AsJson(
        hidden=("keys", "value", "variable", "file"), also=("key", "value", "origin", "variable", "path", "line")
    )

    @property
    def key(self) -> str:
        """Return the key with the names of its tables, separated by dots."""
        return ".".join(self.keys)

    @property
    def origin(self) -> str:
        """Return ``variable``, ``user``, ``site``, ``named`` (a file that a variable names) or ``default``."""
        if self.variable is not None:
            return "variable"
        return "default" if self.file is None else self.file.origin

    @property
    def path(self) -> str | None:
        """Return the path of the file."""
        return None if self.file is None else str(self.file.path)

    @property
    def line(self) -> int | None:
        """Return the line in the file."""
        return None if self.file is None else self.file.line(self.keys)

    @property
    def where(self) -> str:
        """Return the place in words: ``FILE:LINE``, or the variable."""
        return self.variable or ("default" if self.file is None else f"{printable(self.file.path)}:{self.line}")

    def read(self, kind: Callable[[Value], T]) -> T:
        """Return what ``kind`` makes of the value. Raises :class:`BadConfig` if that raises :class:`ValueError`."""
        try:
            return kind(self.value)
        except ValueError as error:
            raise self.wrong(str(error)) from error

    def wrong(self, why: str) -> BadConfig:
        """Return the error for a key or value."""
        return BadConfig(f"{self.where}: {self.key}: {why}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a config file is looked for, whose it is, and whether it exists."""

    path: Path
    origin: str
    exists: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings, and where config files are looked for, the one that counts most first."""

    files: tuple[Place, ...]
    settings: tuple[Setting, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/config/1")

    @property
    def failed(self) -> bool:
        """Return ``False``: listing settings does not fail."""
        return False


@dataclass(frozen=True, slots=True)
class Config:
    """The config files and variables of one environment, as :func:`load` returns them."""

    environment: Environment
    files: tuple[ConfigFile, ...]

    def find_interpreters(self) -> tuple[Path, ...]:
        """Return the interpreters that the key ``python`` lists. Raises :class:`BadConfig`."""
        found = self.find("python")
        return () if found is None else found.read(self.read_interpreters)

    @property
    def places(self) -> tuple[Place, ...]:
        """Return where config files are looked for, the one that counts most first."""
        read = {file.path for file in self.files}
        return tuple(Place(path, origin, path in read) for origin, path in config_paths(self.environment))

    def limits(self, now: float, layers: Container[str], notice: Callable[[str], None]) -> Limits:
        """Return the limits of ``[prune]`` and ``[prune.LAYER]``; ``now`` is epoch seconds.

        ``notice`` gets a line for each layer that is not among ``layers``. Raises :class:`BadConfig`.
        """
        own = {layer: self._limits(("prune", layer), now) for layer in self._limited(layers, notice)}
        return replace(self._limits(("prune",), now), own=own)

    def list_limits(self, layers: Container[str], notice: Callable[[str], None]) -> Iterator[Setting]:
        """Yield the limits of all layers, and those of single layers that are set. Raises :class:`BadConfig`."""
        for table in (("prune",), *(("prune", layer) for layer in self._limited(layers, notice))):
            for name, kind in LIMITS.items():
                setting = self.setting(*table, name)
                if setting.origin != "default":
                    setting.read(kind)
                if setting.origin != "default" or table == ("prune",):
                    yield setting

    def _limited(self, layers: Container[str], notice: Callable[[str], None]) -> list[str]:
        """Return the layers with limits of their own."""
        named: dict[str, Setting] = {}
        for setting in self.below("prune"):
            if isinstance(setting.value, Mapping):
                named.setdefault(setting.keys[-1], setting)
            else:
                _demand_limit(setting)
        for layer in named:
            for setting in self.below("prune", layer):
                _demand_limit(setting)
        ends = "|".join(map(_variable, LIMITS))
        for variable in self.environment.variables:
            if match := re.fullmatch(rf"{SETTING_PREFIX}PRUNE_(\w+)_({ends})", variable):
                layer = match[1].lower().replace("_", "-")
                named.setdefault(layer, Setting(("prune", layer), None, variable))
        for layer, setting in named.items():
            if layer not in layers:
                notice(f"{setting.where}: no layer is called {layer!r}, so its limits are not applied")
        return [layer for layer in named if layer in layers]

    def find(self, *keys: str) -> Setting | None:
        """Return what a variable, or the file that counts most, says of a key; ``None`` if nothing does."""
        variable = SETTING_PREFIX + _variable("_".join(keys))
        if text := self.environment.get(variable):
            return Setting(keys, text, variable)
        for file in self.files:
            if (value := _value(file.tables, keys)) is not None:
                return Setting(keys, tuple(value) if isinstance(value, list) else value, None, file)
        return None

    def setting(self, *keys: str, default: Value = None) -> Setting:
        """Return a setting, or the default of its option."""
        return self.find(*keys) or Setting(keys, default)

    def below(self, *keys: str) -> Iterator[Setting]:
        """Yield each key that the files have in a table; none for the whole file. Raises :class:`BadConfig`."""
        for file in self.files:
            table = _value(file.tables, keys)
            if not isinstance(table, (Mapping, type(None))):
                raise Setting(keys, table, None, file).wrong(f"a table; write [{'.'.join(keys)}] above its keys")
            for name, value in (table or {}).items():
                yield Setting((*keys, name), value, None, file)

    def _limits(self, table: Key, now: float) -> Limits:
        from cachectl.clearing.limits import Limits

        found = {name: self.find(*table, name) for name in LIMITS}
        given = {name: setting.read(LIMITS[name]) for name, setting in found.items() if setting is not None}
        age = given.get("older-than")
        return Limits(
            stale=given.get("stale"),
            before=None if age is None else now - age,
            bytes=given.get("max-size"),
        )

    def read_interpreters(self, value: Value) -> tuple[Path, ...]:
        """Read absolute paths, a list or separated as in ``PATH``. Raises :class:`ValueError` for anything else."""
        paths = tuple(value.split(os.pathsep)) if isinstance(value, str) else value
        if not isinstance(paths, tuple) or not all(isinstance(path, str) for path in paths):
            message = "write a list of paths"
            raise ValueError(message)
        for path in paths:
            if not path.startswith("~/") and not os.path.isabs(path):
                message = f"{path!r} is not absolute; write /path/to/python or ~/path/to/python"
                raise ValueError(message)
        return tuple(self.environment.expand(path) for path in paths)


def load(environment: Environment) -> Config:
    """Read the config files of an environment.

    Raises :class:`ConfigRefused` for a file that cannot be read, or that another user could have written, and
    :class:`BadConfig` for one that is not TOML.
    """
    files = (_read(path, origin) for origin, path in config_paths(environment))
    return Config(environment, tuple(file for file in files if file is not None))


def with_interpreters(environment: Environment) -> Environment:
    """Return an environment with the interpreters of its settings, unless it names others. Raises as :func:`load`."""
    found = () if environment.python_paths else load(environment).find_interpreters()
    return replace(environment, python_paths=found) if found else environment


def _read(path: Path, origin: str) -> ConfigFile | None:
    """Return a config file; ``None`` if it does not exist and no variable names it."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError) as error:
        if origin != "named":
            return None
        raise _refused(path, f"{error.strerror}; correct {CONFIG_VARIABLE}") from error
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise _refused(path, f"not a file of at most {_LARGEST} bytes")
        _demand_own(path, status)
        content = os.read(handle, _LARGEST)
    finally:
        os.close(handle)
    try:
        text = content.decode()
        tables = _parsed(text)
        # Some parsers take tables that are nested deeper than any function can go.
        list(_keys(tables))
        return ConfigFile(path, origin, text, tables)
    except RecursionError as error:
        raise BadConfig(f"{printable(path)}: its tables or lists are nested too deeply") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{printable(path)}:{line}: not UTF-8") from error
    except ValueError as error:
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = int(at[1]) if at and at[1] else content.rstrip().count(b"\n") + 1
        raise BadConfig(f"{printable(path)}:{line}: {str(error)[: at.start() if at else None]}") from error


def _demand_own(path: Path, opened: os.stat_result) -> None:
    """Raise :class:`ConfigRefused` if another user could have written a file that is open, or replaced it."""
    from cachectl.layers.disk.trust import shared_because

    try:
        because = shared_because(path)
        if because is None and not os.path.samestat(opened, os.stat(path)):
            because = "it was replaced just now"
    except OSError as error:
        because = str(error.strerror)
    if because is not None:
        raise _refused(
            path, f"refused: {because}; chmod go-w or chown that, or ignore the file: {CONFIG_VARIABLE}={os.devnull}"
        )


def _refused(path: Path, why: str) -> ConfigRefused:
    return ConfigRefused(f"{printable(path)}: {why}")


def _demand_limit(setting: Setting) -> None:
    if setting.keys[-1] not in LIMITS:
        raise setting.wrong(f"no limit; there are {', '.join(LIMITS)}")


def _parsed(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


@cache
def _lines(text: str) -> Mapping[Key, int]:
    """Return the line on which each key of a valid file begins.

    TOML parsers do not report it. Each statement by itself is a valid file, and no part of it is.
    """
    lines, found, table, start = text.replace("\r\n", "\n").split("\n"), dict[Key, int](), Key(), 0
    for number in range(1, len(lines) + 1):
        # It fails if the cut is inside a value of several lines.
        with suppress(ValueError):
            keys = list(_keys(_parsed("\n".join(lines[start:number]))))
            is_header = lines[start].lstrip().startswith("[")
            for key in keys:
                found.setdefault(key if is_header else (*table, *key), start + 1)
            table = keys[-1] if is_header else table
            start = number
    return found


def _keys(table: Mapping[str, Any]) -> Iterator[Key]:
    """Yield each key of a table, and those of the tables in it."""
    for name, value in table.items():
        yield (name,)
        if isinstance(value, Mapping):
            yield from ((name, *key) for key in _keys(value))


def _value(tables: Mapping[str, Any], keys: Key) -> Any:  # noqa: ANN401 - a value of TOML
    """Return the value of a key, ``None`` if there is none."""
    found: Any = tables
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _variable(key: str) -> str:
    return re.sub("[^A-Z0-9]", "_", key.upper())


# ---------------------------------------------------------------------- values


def read_flag(value: Value) -> bool:
    """Read ``true`` or ``false``; a variable may also say yes, no, 1 or 0. Raises :class:`ValueError`."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_ON, *_OFF):
        return value.lower() in _ON
    message = f"{value!r} is neither true nor false"
    raise ValueError(message)


def _size(value: Value) -> int | None:
    return None if value is False or value == "false" else parse_size(str(value))


def _number(value: Value) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    message = f"{value!r} is no whole number"
    raise ValueError(message)


def _age(value: Value) -> float:
    """Read an age in seconds; ``false`` is endless, so that nothing is that old."""
    return math.inf if value is False or value == "false" else parse_age(str(value))


#: The limits of ``[prune]`` and ``[prune.LAYER]``: the name of each option, and how its value is read.
LIMITS: Final[Mapping[str, Callable[[Value], Any]]] = {
    "max-size": _size,
    "older-than": _age,
    "stale": read_flag,
}
