"""The command that adds a library to the Python that runs cachectl.

It names the missing library and not an extra of cachectl, because a distribution from a folder or repository is in no
index.
"""

from __future__ import annotations

import os
import shlex
import sys


def command_to_install(*libraries: str) -> str:
    """Return the shell command that adds libraries, each named as pip does."""
    return shlex.join([os.path.normpath(sys.executable or "python3"), "-m", "pip", "install", *libraries])
