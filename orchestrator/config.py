"""Settings: ``wait``, ``python``, ``shared``, ``portable``, and the limits of ``prune``.

The user's file takes precedence over the site's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cachectl.layers.base.environment import CONFIG_VARIABLE, Environment, config_paths
from cachectl.layers.base.errors import PARSE_ERRORS, BadRequest, CachectlError
from cachectl.layers.base.text import printable
from cachectl.layers.core.selection import moment_before, parse_age, parse_size, refuse_keywords

#: The longest wait for a lock in seconds: a day.
_LONGEST = 86400


class _Limits(NamedTuple):
    stale: bool = False
    before: float | None = None
    bytes: int | None = None


class Limits(_Limits):
    """What ``prune`` removes.

    :param stale: stale entries
    :param older_than: an age such as ``"30d"``, or seconds: entries not used for so long; ``before`` is that moment
    :param max_size: the longest unused entries, until the pruned layers hold at most this: ``"2G"``, or bytes
    :param now: the time in epoch seconds, by default the present
    :raises BadRequest: for an invalid age or size
    """

    def __new__(  # noqa: PYI034 - Python 3.10 has no Self
        cls,
        stale: bool = False,  # noqa: FBT002 - like the options
        older_than: str | float | None = None,
        max_size: str | int | None = None,
        *,
        now: float | None = None,
        **wrong: NoReturn,
    ) -> Limits:
        """Make limits. Raises :class:`TypeError` for a wrong keyword, which names the right one."""
        if wrong:
            refuse_keywords(cls, wrong)
        most = parse_size(max_size) if isinstance(max_size, str) else max_size
        return super().__new__(cls, stale, moment_before(older_than, now), most)

    @property
    def none(self) -> bool:
        """Return whether nothing is limited."""
        return self == Limits()


class Config(NamedTuple):
    """The settings of one environment, and the files that are looked for, in the order of precedence.

    ``files`` are paths, each with its origin (``user``, ``site`` or ``named``) and whether it exists. ``settings`` maps
    dotted keys to the value as written, and its file.
    """

    files: list[tuple[Path, str, bool]]
    settings: dict[str, tuple[Any, Path]]

    def get(self, key: str) -> Any:  # noqa: ANN401 - each key has its type
        """Return the parsed value of a key; ``None`` if no file has it."""
        return _KEYS[key](self.settings[key][0]) if key in self.settings else None

    def limits(self, now: float) -> Limits:
        """Return the limits of ``[prune]``; ``now`` is epoch seconds."""
        stale, *limits = (self.get(f"prune.{name}") for name in ("stale", "older-than", "max-size"))
        return Limits(bool(stale), *limits, now=now)


def load(environment: Environment) -> Config:
    """Read the config files of an environment.

    Raises :class:`CachectlError` for a file that cannot be read or that another user could have written, and
    :class:`BadRequest` for an unknown key or an invalid value; the message begins with the file.
    """
    config = Config([], {})
    for origin, path in config_paths(environment):
        content = _read(path, needed=origin == "named")
        config.files.append((path, origin, content is not None))
        for key, value in () if content is None else _settings(path, content):
            config.settings.setdefault(key, (value, path))
    return config


def with_interpreters(environment: Environment) -> Environment:
    """Return an environment with the interpreters of its settings, unless it has some. Raises as :func:`load`."""
    paths = None if environment.python_paths else load(environment).get("python")
    return environment._replace(python_paths=tuple(map(environment.expand, paths))) if paths else environment


def _settings(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file. Raises :class:`BadRequest`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        for key, value in _flat(tomllib.loads(content.decode()), ""):
            if key not in _KEYS:
                raise ValueError(f"{key}: unknown key; the keys are {', '.join(_KEYS)}")
            try:
                _KEYS[key](value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            yield key, value
    except PARSE_ERRORS as error:
        raise BadRequest(f"{printable(path)}: {error}") from error


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path, *, needed: bool) -> bytes | None:
    """Return the content of a config file, or ``None`` if it does not exist. Raises :class:`CachectlError`."""
    from cachectl.layers.disk.trust import shared_because

    shown, ignore = printable(path), f"{CONFIG_VARIABLE}={os.devnull}"
    # A broken link, or a file in a folder that this user cannot enter, counts as missing.
    if not needed and not os.path.exists(path):
        return None
    try:
        if (reason := shared_because(path)) is not None:
            raise CachectlError(f"{shown}: refused: {reason}; chmod go-w or chown that, or ignore the file: {ignore}")
        if not path.is_file():
            raise CachectlError(f"{shown}: not a file; replace it, or ignore it: {ignore}")
        return path.read_bytes()
    except OSError as error:
        raise CachectlError(f"{shown}: {error.strerror}; correct its path or mode, or ignore it: {ignore}") from error


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LONGEST:
        raise ValueError(f"{value!r} is not a number of seconds between 0 and {_LONGEST}")
    return value


def _paths(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("write a list of paths")  # noqa: TRY004
    for path in value:
        if not isinstance(path, str) or not (path.startswith("~/") or os.path.isabs(path)):
            raise ValueError(f"{path!r} is not absolute; write /path/to/python or ~/path/to/python")
    return value


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "wait": _seconds,
    "python": _paths,
    "shared": _flag,
    "portable": _flag,
    "prune.max-size": lambda value: parse_size(str(value)),
    "prune.older-than": lambda value: parse_age(str(value)),
    "prune.stale": _flag,
}
