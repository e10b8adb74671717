"""The place of a shared store, by its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.layers.base.errors import BadRequest
from cachectl.moving.transfer import is_url, local_path

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.sharing.place import Place


def place_of(url: str, environment: Environment) -> Place:
    """Return the place of a folder or a URL: ``oci://`` is a registry, other schemes are those of fsspec.

    Nothing is read or made yet, but the server may be connected to. Raises :class:`BadRequest` and
    :class:`~cachectl.moving.transfer.TransferFailed`.
    """
    if not url:
        raise BadRequest("no store is named; name a folder or a URL")
    if url.lower().startswith("oci://"):
        from importlib import import_module

        registry: Place = import_module("cachectl.sharing.registry").RegistryPlace(url)
        return registry
    if is_url(url):
        from cachectl.sharing.remote import RemotePlace

        return RemotePlace(url)
    from cachectl.sharing.folder import FolderPlace

    return FolderPlace(environment.expand(local_path(url)))
