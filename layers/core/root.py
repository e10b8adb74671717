"""Where a cache is, and whether it is used."""

from __future__ import annotations

import errno
import os
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from cachectl.layers.core.json_form import as_json
from cachectl.layers.disk import plain


class Scope(Enum):
    """The owner of the entries in a root."""

    USER = "user"
    SYSTEM = "system"


class Condition(Enum):
    """Whether a layer participates in a run started from this environment."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    BYPASSED = "bypassed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


ENABLED, DISABLED, BYPASSED, ABSENT, UNKNOWN = Condition


class Root(NamedTuple):
    """One place where a layer keeps entries.

    ``source`` is why it is there (a variable or a default); ``role`` distinguishes PoCL's two.
    """

    path: Path
    scope: Scope
    source: str
    role: str = ""

    @property
    def exists(self) -> bool:
        """Return whether something exists there now. Raises :class:`OSError` if that is unknown."""
        try:
            return plain.status_at(self.path, follow=True) is not None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise

    @property
    def may_exist(self) -> bool:
        """Return whether something exists there, even a dangling link, or that is unknown."""
        try:
            return self.exists or os.path.lexists(self.path)
        except OSError:
            return True


@as_json(names={"condition": "state"})
class State(NamedTuple):
    """A layer's condition and the reason for it; ``drivers`` are the files that register its OpenCL drivers."""

    condition: Condition
    why: str
    drivers: tuple[str, ...] = ()
