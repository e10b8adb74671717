"""The own roots of ``cachectl run --base``: folders in the user cache folder, each for the new entries of one base."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from cachectl.layers.base.environment import Environment, user_cache_folder
from cachectl.layers.base.errors import CachectlError


def own_roots(environment: Environment) -> list[Path]:
    """Return the own roots of all bases."""
    folder = _folder(environment)
    # A missing or unreadable folder must not prevent the use of other roots.
    with suppress(OSError):
        # In an isolated root it is a link to the user's.
        if not folder.parent.is_symlink():
            roots = (root for base in folder.iterdir() for root in (base, *base.glob("cachectl-*")))
            return sorted(root for root in roots if not root.is_symlink())
    return []


def own_root(environment: Environment, base: Path) -> Path:
    """Return the own root of a base, existing or not, whose name depends on the base's path.

    Links in that path are not resolved: if ``/site/current`` leads to a new release, the own entries stay in use.
    """
    import hashlib

    return _folder(environment) / hashlib.sha256(os.fsencode(base)).hexdigest()[:16]


def make_own_root(environment: Environment, base: Path) -> Path:
    """Make the own root of a base if it is missing; return its private folder, itself or one within it.

    See :func:`~cachectl.layers.disk.temporaries.private_folder`. Raises :class:`CachectlError`.
    """
    from cachectl.layers.disk import temporaries

    try:
        return temporaries.private_folder(own_root(environment, base), make=True)
    except CachectlError as error:
        message = f"cannot make a root for new entries of the base: {error}; give one with --isolated=ROOT"
        raise CachectlError(message) from error


def _folder(environment: Environment) -> Path:
    return user_cache_folder(environment, "cachectl")[0] / "bases"
