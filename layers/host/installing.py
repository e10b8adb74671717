"""The command that adds a library to the Python that runs cachectl, for each way in which cachectl is installed.

The command names the missing library and not an extra of cachectl, because a distribution from a folder or repository
is in no index.

Sources: PEP 668 (``EXTERNALLY-MANAGED``); pipx 1.16 and uv 0.13 (tried): pipx keeps ``pipx_metadata.json`` in the
environment of a tool, uv ``uv-receipt.toml``, and ``uv`` in the ``pyvenv.cfg`` of those that it makes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PIPX: Final = "pipx_metadata.json"
_UV_TOOL: Final = "uv-receipt.toml"
#: Where pipx and uv keep tools if nothing says otherwise, below the home; and pipx for all users.
_PIPX_HOMES: Final = (".local/share/pipx", ".local/pipx", "Library/Application Support/pipx")
_PIPX_GLOBAL: Final = Path("/opt/pipx")
_UV_TOOLS: Final = ".local/share/uv/tools"
_UV_BIN: Final = ".local/bin"


@dataclass(frozen=True, slots=True)
class Installation:
    """The Python environment that cachectl runs in.

    ``library`` is the folder of its standard library, ``has_pip`` whether it can import pip.
    """

    prefix: Path
    base_prefix: Path
    python: Path
    library: Path
    has_pip: bool
    home: Path

    @classmethod
    def here(cls) -> Installation:
        """Return the Python that runs this."""
        import sysconfig
        from importlib.util import find_spec

        return cls(
            Path(sys.prefix),
            Path(sys.base_prefix),
            # Python started by a relative path keeps dots in it.
            Path(os.path.normpath(sys.executable or "python3")),
            Path(sysconfig.get_path("stdlib")),
            find_spec("pip") is not None,
            Path.home(),
        )

    def command_to_add(self, libraries: Sequence[str]) -> str:
        """Return a line for a POSIX shell that adds libraries, each named as pip does."""
        if (self.prefix / _PIPX).exists():
            return self._with_pipx(libraries)
        if (self.prefix / _UV_TOOL).exists():
            return self._with_uv_tool(libraries) or self._with_uv(libraries)
        if self.has_pip:
            return self._with_pip(libraries)
        if self._made_by_uv():
            return self._with_uv(libraries)
        return f"{shlex.join([str(self.python), '-m', 'ensurepip'])} && {self._with_pip(libraries)}"

    def _with_pip(self, libraries: Sequence[str]) -> str:
        # If the system blocks pip, cachectl was installed by overriding that.
        in_system = self.prefix == self.base_prefix and (self.library / "EXTERNALLY-MANAGED").exists()
        overruled = ["--break-system-packages"] if in_system else []
        return shlex.join([str(self.python), "-m", "pip", "install", *overruled, *libraries])

    def _with_uv(self, libraries: Sequence[str]) -> str:
        return shlex.join(["uv", "pip", "install", "--python", str(self.python), *libraries])

    def _with_pipx(self, libraries: Sequence[str]) -> str:
        home, name = self.prefix.parent.parent, self.prefix.name
        if home == _PIPX_GLOBAL:
            return shlex.join(["sudo", "pipx", "inject", "--global", name, *libraries])
        variables = [] if home in self._below_home(*_PIPX_HOMES) else [f"PIPX_HOME={home}"]
        return shlex.join([*_env(variables), "pipx", "inject", name, *libraries])

    def _with_uv_tool(self, libraries: Sequence[str]) -> str | None:
        """Return the command that reinstalls the tool with more libraries; ``None`` if its receipt is unknown.

        The next ``uv tool upgrade`` removes a library that ``uv pip`` added, and the next ``uv tool install`` removes
        one that it does not name again.
        """
        receipt = _read_toml(self.prefix / _UV_TOOL)
        try:
            tool, *others = receipt["tool"]["requirements"]
            before = [word for other in others for word in _requirement("--with", other)]
            python = ["--python", receipt["tool"]["python"]] if "python" in receipt["tool"] else []
            bins = {Path(point["install-path"]).parent for point in receipt["tool"]["entrypoints"]}
            source = _requirement("", tool)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None
        added = [word for library in libraries for word in ("--with", library)]
        variables = [] if self.prefix.parent in self._below_home(_UV_TOOLS) else [f"UV_TOOL_DIR={self.prefix.parent}"]
        variables += [f"UV_TOOL_BIN_DIR={one}" for one in bins - self._below_home(_UV_BIN)]
        return shlex.join([*_env(variables), "uv", "tool", "install", *python, *before, *added, *source])

    def _made_by_uv(self) -> bool:
        try:
            lines = (self.prefix / "pyvenv.cfg").read_text().splitlines()
        except (OSError, UnicodeError):
            return False
        return any(line.partition("=")[0].strip() == "uv" for line in lines)

    def _below_home(self, *places: str) -> set[Path]:
        return {self.home / place for place in places}


def command_to_install(*libraries: str) -> str:
    """Return the shell command that adds libraries to the Python that runs cachectl, each named as pip does."""
    return Installation.here().command_to_add(libraries)


def _env(variables: Sequence[str]) -> list[str]:
    return ["env", *variables] if variables else []


def _read_toml(file: Path) -> Mapping[str, Any]:
    """Return the content of a TOML file; empty if it cannot be read, or before Python 3.11, which has no reader."""
    try:
        import tomllib
    except ImportError:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def _requirement(option: str, one: Mapping[str, Any]) -> list[str]:
    """Return the arguments of uv for a requirement of a receipt, after an option if it takes one."""
    extras = f"[{','.join(one['extras'])}]" if one.get("extras") else ""
    if "editable" in one:
        return [f"{option or '-'}-editable", f"{one['editable']}{extras}"]
    place = one.get("directory") or one.get("path")
    url = Path(place).as_uri() if place else one.get("url")
    if "git" in one:
        repository, _, revision = one["git"].partition("?")
        revision = revision.partition("#")[0].partition("=")[2]
        url = f"git+{repository}" + (f"@{revision}" if revision else "")
    source = f" @ {url}" if url else one.get("specifier", "")
    return [*([option] if option else []), f"{one['name']}{extras}{source}"]
