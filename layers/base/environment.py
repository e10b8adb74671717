"""The environment that a program would start in: variables, home, platform, clock.

Layers answer from an :class:`Environment` only, so any question can also be asked for another user, platform or root.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, wraps
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import NamedTuple, TypeVar, cast

T = TypeVar("T")
#: Where Linux lists mounted file systems.
MOUNTS = Path("/proc/self/mountinfo")
#: Seconds to wait for a lock that another process holds.
LOCK_TIMEOUT = 5.0
_WINDOWS_CACHE_HOME = "WIN_PD_OVERRIDE_LOCAL_APPDATA"


class Surroundings(NamedTuple):
    """The values of an :class:`Environment`."""

    variables: Mapping[str, str]
    home: Path
    platform: str = "linux"
    cwd: Path = Path("/")
    temporary: Path = Path("/tmp")  # noqa: S108 - the C library's own default, overridden by TMPDIR
    python: str = ".".join(map(str, sys.version_info))
    site: tuple[Path, ...] = ()
    prefix: Path | None = None
    installed: Callable[[str], str | None] = lambda _: None
    clock: Callable[[], float] = time.time
    step: Callable[..., None] = lambda *_: None
    lock_timeout: float = LOCK_TIMEOUT
    processes: Path = Path("/proc")
    mounts: Path = MOUNTS
    topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")
    superuser: bool = False
    shared: bool = False
    executable: Path = Path(os.path.abspath(sys.executable))
    python_paths: tuple[Path, ...] = ()
    searches_pythons: bool = False


class Environment(Surroundings):
    """Everything that decides where caches are and whether they are on.

    ``home`` is the account's home folder by the password database, used if ``HOME`` is not set. ``python`` is the
    five-part version that pytools and PyOpenCL put into names, ``executable`` its interpreter, and ``prefix`` the
    folder that it is installed in (``None`` without a Python). ``site`` lists its folders of installed packages, and
    ``installed`` returns the version of a distribution there, or ``None``. ``python_paths`` are other interpreters that
    the user named, and ``searches_pythons`` says whether to look for more. ``step`` is called with a number for entries
    that were examined or changed, and with a description and a total at the start of long work. ``lock_timeout`` is in
    seconds. ``processes`` is where the system shows running programs, ``mounts`` where it lists mounted file systems,
    and ``topology`` where AMD's driver lists CPUs and GPUs. ``superuser`` says whether the user is root, and ``shared``
    whether other users who can write to a cache are trusted.
    """

    @cached_property
    def answers(self) -> dict[object, object]:
        """The answers of the functions that :func:`answered_once` decorates, kept as long as the environment."""
        return {}

    @property
    def trusts_writers(self) -> bool:
        """Return whether other users who can write to a cache are trusted, which is never so for root."""
        return self.shared and not self.superuser

    def get(self, variable: str) -> str | None:
        """Return a variable's value, ``None`` if it is not set (an empty value is a value)."""
        return self.variables.get(variable)

    def with_variables(self, changes: Mapping[str, str | None], unset: Iterable[str] = ()) -> Environment:
        """Return the environment with some variables set, or removed if they map to ``None`` or are in ``unset``."""
        merged = {**self.variables, **dict.fromkeys(unset), **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        return self._replace(variables=MappingProxyType(kept))

    @property
    def home_folder(self) -> Path:
        """The home that platformdirs uses for ``~``: an absolute ``HOME``; for any other the release decides."""
        named = self.variables.get("HOME")
        # Releases before 4.12 follow an empty value, those before 4.14 a relative one.
        if named is None or (not os.path.isabs(named) and self.platformdirs >= ((4, 14) if named else (4, 12))):
            return self.home
        return self.cwd / (named or "/")

    @property
    def named_temporary(self) -> Path:
        """The temporary folder of C++ (``temp_directory_path``): the first variable that is set, even if empty."""
        names = (variable for variable in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if variable in self.variables)
        return self.absolute(self.variables.get(next(names, ""), self.temporary))

    @property
    def follows_relative_cache_home(self) -> bool:
        """Return whether platformdirs follows a relative ``XDG_CACHE_HOME``, as it does up to release 4.11.7."""
        return self.platformdirs < (4, 11, 8)

    @property
    def platformdirs(self) -> tuple[int, ...]:
        """Return the release of platformdirs, or one newer than any if it is not installed."""
        return release_of(self.installed("platformdirs")) or (sys.maxsize,)

    def absolute(self, path: str | Path) -> Path:
        """Make a path absolute as a program started here would."""
        return self.cwd / path

    def expand(self, path: str) -> Path:
        """Expand a leading ``~``, and make the path absolute."""
        if path == "~" or path.startswith("~/"):
            return self.home_folder / path[2:]
        return self.absolute(path)


def answered_once(answer: Callable[[Environment], T]) -> Callable[[Environment], T]:
    """Decorate a function of an environment to keep its answer as long as the environment."""

    @wraps(answer)
    def kept(environment: Environment) -> T:
        if answer not in environment.answers:
            environment.answers[answer] = answer(environment)
        return cast("T", environment.answers[answer])

    return kept


def release_of(version: str | None) -> tuple[int, ...] | None:
    """Return up to three leading numbers of a version, for comparisons; ``None`` if it has none."""
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version or "")
    return None if match is None else tuple(int(part) for part in match.groups() if part is not None)


def python_release(version: str) -> str:
    """Return the first three parts of a Python's five-part version."""
    return ".".join(version.split(".")[:3])


def user_name(number: int) -> str:
    """Return the name of an account, or ``user N`` if it has none."""
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return f"user {number}"


def node() -> str:
    """Return the name of this machine."""
    if sys.platform != "win32":
        return os.uname().nodename
    import platform

    return platform.node()


def user_cache_folder(environment: Environment, application: str) -> tuple[Path, str]:
    """Return where pytools and PyOpenCL keep an application's cache, and the reason.

    The rule is that of the environment's release of platformdirs, except for pytools' own line for macOS
    (``pytools/persistent_dict.py``, ``pyopencl/cache.py``). The tests compare it with the answers of many releases.
    """
    if environment.platform == "win32":
        variable, parts = _WINDOWS_CACHE_HOME, (application, application, "Cache")
        named, release = environment.get(variable), environment.platformdirs
        # Release 4.8 introduced it; since 4.11.14 a relative value is ignored.
        is_followed = release < (4, 11, 14) or PureWindowsPath(named or "").is_absolute()
        if not named or release < (4, 8) or not is_followed:
            variable = "LOCALAPPDATA"
        if named := environment.get(variable):
            return Path(named, *parts), variable
        return environment.home_folder.joinpath("AppData", "Local", *parts), "default"
    if environment.platform != "darwin":
        return _linux_folder(environment, application, "XDG_CACHE_HOME", ".cache")
    # This line is pytools' own, and accepts any value.
    if (named := environment.get("XDG_CACHE_HOME")) is not None:
        return environment.absolute(named) / application, "XDG_CACHE_HOME"
    return environment.home_folder / "Library" / "Caches" / application, "default"


def is_common_cache_home(environment: Environment) -> bool:
    """Return whether all releases of platformdirs are certain to agree on the user's cache folder."""
    home, named = environment.variables.get("HOME", "/"), environment.get("XDG_CACHE_HOME") or "/"
    return os.path.isabs(home) and os.path.isabs(named) and environment.get(_WINDOWS_CACHE_HOME) is None


def user_state_folder(environment: Environment) -> Path:
    """Return where cachectl keeps its own files that are not a cache, by the rule of :func:`user_cache_folder`."""
    return _own_folder(environment, "user_state_dir", "XDG_STATE_HOME", ".local/state")


#: Names a file to read instead of the user's and the site's; :data:`os.devnull` means none.
CONFIG_VARIABLE = "CACHECTL_CONFIG"


def config_paths(environment: Environment) -> tuple[tuple[str, Path], ...]:
    """Return the paths of config files in order of precedence, each with its origin: ``user``, ``site`` or ``named``.

    ``named`` is by ``CACHECTL_CONFIG``. The folders are those of platformdirs.
    """
    if named := environment.get(CONFIG_VARIABLE):
        return () if named == os.devnull else (("named", environment.expand(named)),)
    sites = [folder for folder in (environment.get("XDG_CONFIG_DIRS") or "").split(os.pathsep) if os.path.isabs(folder)]
    folders = [("site", Path(site, "cachectl")) for site in sites or ["/etc/xdg"]]
    if environment.platform == sys.platform != "linux":
        folders = [("site", _own_folder(environment, "site_config_dir", "", ""))]
    user = _own_folder(environment, "user_config_dir", "XDG_CONFIG_HOME", ".config")
    return tuple((origin, folder / "config.toml") for origin, folder in (("user", user), *folders))


def _own_folder(environment: Environment, function: str, variable: str, default: str) -> Path:
    """Return a folder of cachectl's own; on this machine, unless it runs Linux, by a ``function`` of platformdirs."""
    if environment.platform == sys.platform != "linux":
        import platformdirs

        return Path(getattr(platformdirs, function)("cachectl", appauthor=False))
    return _linux_folder(environment, "cachectl", variable, default)[0]


def _linux_folder(environment: Environment, application: str, variable: str, default: str) -> tuple[Path, str]:
    named = environment.get(variable)
    if named and os.path.isabs(named):
        return Path(named, application), variable
    if named and named.strip() and environment.follows_relative_cache_home:
        return environment.absolute(named) / application, variable
    ignored = "" if named is None else f" ({variable}={named!r} is not absolute, so it is ignored)"
    return environment.home_folder / default / application, f"default{ignored}"
