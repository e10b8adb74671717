"""The environment a program would start in: variables, home, platform, clock.

Layers answer from an :class:`Environment` and from nothing else, so the same question can be put for another
user, another platform or a scratch folder. This module is the one place that touches :data:`os.environ`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from cachectl.layers.disk.locks import PATIENCE
from cachectl.layers.host.distributions import version_of
from cachectl.layers.host.mounts import MOUNTS


def _unknown_version(distribution: str) -> str | None:  # noqa: ARG001 - the signature of a lookup
    return None


@dataclass(frozen=True)
class Environment:
    """Everything that decides where caches are and whether they are on.

    ``home`` is the account's home folder (what the password database says), used where ``HOME`` is not;
    ``python`` is the five-part version that pytools and PyOpenCL put into their names; ``site`` lists the
    folders of installed packages; ``installed`` gives the version of a distribution there, or ``None``; ``prefix`` is
    the folder that Python is installed in, or ``None`` where no Python is meant;
    ``patience`` is how many seconds a lock that somebody else holds is waited for; ``processes`` is where the
    system shows running programs, ``mounts`` where it lists mounted file systems, and ``topology`` where AMD's
    driver lists processors, GPUs among them. ``superuser`` tells whether this is one, and ``over_others`` whether it
    is meant to change what belongs to other users.
    """

    variables: Mapping[str, str]
    home: Path
    platform: str = "linux"
    cwd: Path = Path("/")
    temporary: Path = Path("/tmp")  # noqa: S108 - the C library's own default, overridden by TMPDIR
    python: str = ".".join(str(part) for part in sys.version_info)
    site: tuple[Path, ...] = ()
    prefix: Path | None = None
    installed: Callable[[str], str | None] = _unknown_version
    clock: Callable[[], float] = field(default=time.time)
    patience: float = PATIENCE
    processes: Path = Path("/proc")
    mounts: Path = MOUNTS
    topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")
    superuser: bool = False
    over_others: bool = False

    @classmethod
    def here(cls) -> Environment:
        """Describe this very process."""
        return cls(
            variables=MappingProxyType(dict(os.environ)),
            home=_account_home(),
            platform=sys.platform,
            cwd=Path.cwd(),
            temporary=_temporary_folder(),
            site=tuple(Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))),
            prefix=Path(sys.prefix),
            installed=version_of,
            superuser=hasattr(os, "geteuid") and os.geteuid() == 0,
        )

    def get(self, variable: str) -> str | None:
        """Return a variable's value, ``None`` where it is not set (an empty value is a value)."""
        return self.variables.get(variable)

    def with_variables(self, changes: Mapping[str, str], unset: frozenset[str] = frozenset()) -> Environment:
        """Return the same environment with some variables set and others gone."""
        kept = {name: value for name, value in self.variables.items() if name not in unset}
        return replace(self, variables=MappingProxyType({**kept, **changes}))

    @property
    def home_folder(self) -> Path:
        """The home that ``~`` means to platformdirs: ``HOME`` if absolute, else what its version makes of it."""
        named = self.variables.get("HOME")
        if named is None or Path(named).is_absolute():
            return self.home if named is None else Path(named)
        release = release_of(self.installed("platformdirs"))
        # Older ones took any value as it stands, 4.12 began to pass over an empty and 4.14 over a relative one.
        if release is not None and release < ((4, 14) if named else (4, 12)):
            return self.cwd / named if named else Path("/")
        return self.home

    def absolute(self, path: str | Path) -> Path:
        """Place a possibly relative path where a program started here would."""
        return self.cwd / path

    def expand(self, path: str) -> Path:
        """Expand a leading ``~`` and place the path."""
        if path == "~" or path.startswith("~/"):
            return self.home_folder / path[2:]
        return self.absolute(path)


def release_of(version: str | None) -> tuple[int, ...] | None:
    """Return the first three numbers of a version, to be compared; ``None`` where it has none."""
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version or "")
    return None if match is None else tuple(int(part) for part in match.groups() if part is not None)


def user_name(number: int) -> str:
    """Name an account, or spell its number where it has none."""
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return f"user {number}"


def process_variable(name: str) -> str | None:
    """Return a variable of this process as it is now."""
    return os.environ.get(name)


def set_process_variable(name: str, value: str | None) -> None:
    """Set a variable of this process, and so of the children it starts; ``None`` removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def user_cache_folder(environment: Environment, application: str) -> tuple[Path, str]:
    """Return where pytools and PyOpenCL keep an application's cache, and why it is there.

    The rule is platformdirs' with pytools' own line for macOS (``pytools/persistent_dict.py``,
    ``pyopencl/cache.py``): on Linux a relative or empty ``XDG_CACHE_HOME`` is ignored, on macOS any value
    counts as it stands.
    """
    xdg = environment.get("XDG_CACHE_HOME")
    if environment.platform == "win32":
        return _windows_cache_folder(environment, application)
    if environment.platform == "darwin":
        if xdg is not None:
            return environment.absolute(Path(xdg) / application), "XDG_CACHE_HOME"
        return environment.home_folder / "Library" / "Caches" / application, "default"
    if xdg is not None and Path(xdg).is_absolute():
        return Path(xdg) / application, "XDG_CACHE_HOME"
    ignored = "" if xdg is None else f" (XDG_CACHE_HOME={xdg!r} is not absolute, so it is ignored)"
    return environment.home_folder / ".cache" / application, f"default{ignored}"


def _windows_cache_folder(environment: Environment, application: str) -> tuple[Path, str]:
    for variable in ("WIN_PD_OVERRIDE_LOCAL_APPDATA", "LOCALAPPDATA"):
        value = environment.get(variable)
        if value:
            return Path(value, application, application, "Cache"), variable
    return environment.home_folder.joinpath("AppData", "Local", application, application, "Cache"), "default"


def _account_home() -> Path:
    if sys.platform == "win32":
        return Path(os.path.expanduser("~"))
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        # A container's numeric user has no account; "/" is what such a process gets from its shell.
        return Path(os.environ.get("HOME") or "/")


def _temporary_folder() -> Path:
    if sys.platform == "win32":
        import tempfile

        return Path(tempfile.gettempdir())
    # As tempfile does, which takes long to import.
    named = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((folder for folder in named if folder and os.path.isdir(folder)), "/tmp")).absolute()  # noqa: S108
