"""The place of a shared store, by its URL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import BadRequest
from cachectl.moving.transfer import is_url, local_path

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layers.base.environment import Environment
    from cachectl.sharing.place import Place

_REGISTRY: Final = ("oci://", "oci+http://")


def is_pinned(url: str) -> bool:
    """Return whether a URL names one state of a store by its digest: ``oci://HOST/NAME@sha256:…``."""
    return url.lower().startswith(_REGISTRY) and "@sha256:" in url


def place_of(address: str | Path, environment: Environment) -> Place:
    """Return the place of a folder or a URL: ``oci://`` is a registry, other schemes are those of fsspec.

    Nothing is read or made yet, but the server may be connected to. Raises :class:`BadRequest` and
    :class:`~cachectl.moving.transfer.TransferFailed`.
    """
    url = os.fspath(address)
    if not url:
        raise BadRequest("no store is named; name a folder or a URL")
    if is_url(url):
        from cachectl.sharing.remote import RemotePlace

        return RemotePlace(url)
    from cachectl.sharing.folder import FolderPlace

    return FolderPlace(environment.expand(local_path(url)))
