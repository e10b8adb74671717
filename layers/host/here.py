"""This process as an environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from cachectl.layers.base.environment import Environment
from cachectl.layers.disk.distributions import version_in
from cachectl.layers.host.variables import process_variables


def this_environment() -> Environment:
    """Return the environment of this process."""
    variables = process_variables()
    return Environment(
        variables=MappingProxyType(variables),
        home=_account_home(variables),
        platform=sys.platform,
        cwd=Path.cwd(),
        temporary=_temporary_folder(variables),
        site=tuple(Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))),
        prefix=Path(sys.prefix),
        installed=partial(version_in, sys.path),
        searches_pythons=True,
        superuser=hasattr(os, "geteuid") and os.geteuid() == 0,
    )


def _account_home(variables: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        return Path(os.path.expanduser("~"))
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        # A numeric user in a container has no account; its shell sets HOME=/.
        return Path(variables.get("HOME") or "/")


def _temporary_folder(variables: Mapping[str, str]) -> Path:
    if sys.platform == "win32":
        import tempfile

        return Path(tempfile.gettempdir())
    # By the rule of tempfile, whose import is slow.
    named = (variables.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((folder for folder in named if folder and os.path.isdir(folder)), "/tmp")).absolute()  # noqa: S108
