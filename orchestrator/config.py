"""Settings: ``wait``, ``python``, ``shared`` and the limits of ``prune``. The user's file counts, then a site's."""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cachectl.layers.base.environment import CONFIG_VARIABLE, config_paths
from cachectl.layers.base.errors import BadRequest, CachectlError, printable
from cachectl.layers.base.facts import AsJson
from cachectl.layers.base.selection import parse_age, parse_size

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment

#: Larger than any config file, in bytes.
_LARGEST: Final = 1 << 16
#: The longest wait for a lock in seconds: a day.
_LONGEST: Final = 86400


class BadConfig(BadRequest):
    """A wrong key or value; the text begins with the file."""


class ConfigRefused(CachectlError):
    """A config file that cannot be read, or that another user could have written."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ``prune`` removes: stale entries, entries last used before a moment, then the excess over a size.

    ``before`` is epoch seconds; ``bytes`` bounds what the pruned layers hold together. ``own`` are the limits of single
    layers: their ``stale`` and ``before`` replace those of all, their ``bytes`` bounds what the layer holds by itself.
    """

    stale: bool | None = None
    before: float | None = None
    bytes: int | None = None
    own: Mapping[str, Limits] = field(default_factory=dict)

    @property
    def none(self) -> bool:
        """Return whether nothing is limited."""
        return not self.stale and self.before is None and self.bytes is None and not self.own


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A key with the names of its tables, its value as it was written, and the file that has it."""

    key: str
    value: str | float | bool | tuple[str, ...]
    path: Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where a config file is looked for, whose it is (``user``, ``site`` or ``named``), and whether it exists."""

    path: Path
    origin: str
    exists: bool


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one environment, and where files are looked for, the one that counts most first."""

    files: tuple[Place, ...]
    settings: tuple[ConfigEntry, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/config/1")
    failed: ClassVar[bool] = False

    def get(self, key: str) -> Any:  # noqa: ANN401 - each key has its type
        """Return the value of a key as it was read; ``None`` if no file has it."""
        found = {setting.key: setting.value for setting in self.settings}
        return _KEYS[key.rpartition(".")[2]](found[key]) if key in found else None

    @property
    def interpreters(self) -> tuple[str, ...]:
        """Return the interpreters that the key ``python`` lists."""
        return self.get("python") or ()

    def limits(self, now: float, layers: Container[str], notice: Callable[[str], None]) -> Limits:
        """Return the limits of ``[prune]`` and ``[prune.LAYER]``; ``now`` is epoch seconds.

        ``notice`` gets a line for each layer that is not among ``layers``.
        """
        tables = {setting.key.rpartition(".")[0]: setting for setting in self.settings}
        named = {table[6:]: setting for table, setting in tables.items() if table.startswith("prune.")}
        for layer, setting in named.items():
            if layer not in layers:
                notice(f"{printable(setting.path)}: unknown layer {layer!r}, so its limits are not applied")
        own = {layer: self._limits(f"prune.{layer}", now) for layer in named if layer in layers}
        return replace(self._limits("prune", now), own=own)

    def _limits(self, table: str, now: float) -> Limits:
        age, size = self.get(f"{table}.older-than"), self.get(f"{table}.max-size")
        before = None if age is None else now - age
        return Limits(stale=self.get(f"{table}.stale"), before=before, bytes=None if size == math.inf else size)


def load(environment: Environment) -> Config:
    """Read the config files of an environment.

    Raises :class:`ConfigRefused` for a file that cannot be read, or that another user could have written, and
    :class:`BadConfig` for one with an unknown key or a wrong value.
    """
    places, found = [], dict[str, ConfigEntry]()
    for origin, path in config_paths(environment):
        content = _read(path, needed=origin == "named")
        places.append(Place(path, origin, content is not None))
        for setting in () if content is None else _settings(path, content):
            found.setdefault(setting.key, setting)
    return Config(tuple(places), tuple(found.values()))


def configured_limits(layers: LayerSet, notice: Callable[[str], None]) -> Limits:
    """Return the limits of the config files; ``notice`` gets a line for each layer that is unknown.

    Raises :class:`BadRequest` if there are none, and as :func:`load` does.
    """
    environment = layers.environment
    limits = load(environment).limits(environment.clock(), layers, notice)
    if limits.none:
        places = [printable(path) for _, path in config_paths(environment)]
        where = f", or write a limit below [prune] in {places[0]}, such as max-size = '5G'" if places else ""
        raise BadRequest(f"name a limit: --stale, --older-than or --max-size{where}")
    return limits


def with_interpreters(environment: Environment) -> Environment:
    """Return an environment with the interpreters of its settings, unless it names others. Raises as :func:`load`."""
    found = () if environment.python_paths else load(environment).interpreters
    return replace(environment, python_paths=tuple(map(environment.expand, found))) if found else environment


def _settings(path: Path, content: bytes) -> Iterator[ConfigEntry]:
    """Yield the settings of a file. Raises :class:`BadConfig`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        for key, value in _flat(tomllib.loads(content.decode()), ""):
            table, _, name = key.rpartition(".")
            if name not in (_GENERAL if not table else _LIMITS if table.split(".")[0] == "prune" else ()):
                known = f"{', '.join(_GENERAL)}, and below [prune] {', '.join(_LIMITS)}"
                raise ValueError(f"{key}: unknown key; there are {known}")
            setting = ConfigEntry(key, tuple(value) if isinstance(value, list) else value, path)
            try:
                _KEYS[name](setting.value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            yield setting
    except RecursionError as error:
        raise BadConfig(f"{printable(path)}: its tables or lists are nested too deeply") from error
    except ValueError as error:
        raise BadConfig(f"{printable(path)}: {error}") from error


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path, *, needed: bool) -> bytes | None:
    """Return the content of a config file, or ``None`` if it does not exist. Raises :class:`ConfigRefused`."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not needed:
            return None
        raise ConfigRefused(f"{printable(path)}: {error.strerror}; correct it, or {CONFIG_VARIABLE}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise ConfigRefused(f"{printable(path)}: not a file of at most {_LARGEST} bytes")
        if (reason := _shared(path, status)) is not None:
            fix = f"chmod go-w or chown that, or ignore the file: {CONFIG_VARIABLE}={os.devnull}"
            raise ConfigRefused(f"{printable(path)}: refused: {reason}; {fix}")
        return os.read(handle, _LARGEST)
    finally:
        os.close(handle)


def _shared(path: Path, opened: os.stat_result) -> str | None:
    """Return why another user could have written an open file, or put it there; or ``None``."""
    from cachectl.layers.disk.trust import shared_because

    try:
        replaced = not os.path.samestat(opened, os.stat(path))
        return shared_because(path) or ("it was replaced just now" if replaced else None)
    except OSError as error:
        return str(error.strerror)


# ---------------------------------------------------------------------- values


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LONGEST:
        raise ValueError(f"{value!r} is not a number of seconds between 0 and {_LONGEST}")
    return value


def _paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple) or not all(isinstance(path, str) for path in value):
        raise ValueError("write a list of paths")
    for path in value:
        if not path.startswith("~/") and not os.path.isabs(path):
            raise ValueError(f"{path!r} is not absolute; write /path/to/python or ~/path/to/python")
    return value


def _size(value: object) -> float:
    """Read a size in bytes; ``false`` is endless."""
    return math.inf if value is False else parse_size(str(value))


def _age(value: object) -> float:
    """Read an age in seconds; ``false`` is endless, so that nothing is that old."""
    return math.inf if value is False else parse_age(str(value))


_GENERAL: Final = ("wait", "python", "shared")
#: The limits of ``[prune]`` and ``[prune.LAYER]``.
_LIMITS: Final = ("max-size", "older-than", "stale")
_KEYS: Final[Mapping[str, Callable[[object], Any]]] = {
    "wait": _seconds,
    "python": _paths,
    "shared": _flag,
    "max-size": _size,
    "older-than": _age,
    "stale": _flag,
}
