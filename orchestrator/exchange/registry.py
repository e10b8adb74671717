"""A bundle in a registry: one blob and the manifest of a tag, moved through the library ``oras``.

Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import AbstractContextManager
from functools import partial
from http import HTTPStatus
from typing import Any, BinaryIO, Final
from urllib.parse import urlencode, urljoin, urlsplit

from cachectl.exchange import bundle, place
from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_BUNDLE: Final = "application/vnd.cachectl.bundle.v1+zip"
_EMPTY: Final = b"{}"
_ADDRESS: Final = re.compile(
    r"oci(?P<plain>\+http)?://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
_LOCAL: Final = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
#: Limit on the silence of a server, in seconds, and on the bytes of a manifest.
_SILENCE: Final = 60
_LARGEST_MANIFEST: Final = 4 << 20
_CHUNK: Final = 1 << 20
_LONGEST_REASON: Final = 300


class RegistryPlace(bundle.BundlePlace):
    """The bundle at ``oci://HOST/NAME:TAG``; plain HTTP is for this machine, and for ``oci+http://``."""

    def __init__(self, url: str, environment: Environment) -> None:
        address = _ADDRESS.fullmatch(url)
        if address is None:
            message = f"{errors.printable(url)[:200]!r} is not of the form oci://HOST/NAME:TAG"
            if "@" in url.partition("://")[2].partition("/")[0]:
                message = "an oci:// address takes no password; use docker login or podman login"
            raise errors.BadRequest(message)
        self.shown = errors.printable(url)
        host, name, tag = address["host"], address["name"], address["tag"] or "latest"
        with self._translated():
            from oras.container import Container
            from oras.provider import Registry

            # Oras prints each failure, besides what is raised here.
            logging.getLogger("oras.logger").setLevel(logging.CRITICAL)
            plain = address["plain"] is not None or _LOCAL.fullmatch(host) is not None
            self._registry = Registry(host, insecure=plain)
            self._container = Container(f"{host}/{name}:{tag}", registry=host)
            self._registry.auth.load_configs(self._container)
        session = self._registry.session
        session.request = partial(session.request, timeout=_SILENCE)
        self._seen: str | None = None
        super().__init__(None, environment, shown=self.shown)

    def _open(self) -> BinaryIO | None:
        """Download the bundle of the tag; ``None`` if there is no such tag."""
        manifest, self._seen = self._manifest()
        if self._seen is None:
            return None
        try:
            (layer,) = manifest["layers"]
            digest, is_bundle = str(layer["digest"]), layer["mediaType"] == _BUNDLE
        except (KeyError, TypeError, ValueError):
            is_bundle = False
        if not is_bundle or not re.fullmatch("sha256:[0-9a-f]{64}", digest):
            raise place.BadStore(f"{self.shown} is not a bundle of cachectl; choose another tag")
        url = self._url(self._container.get_blob_url(digest))
        with self._translated(), self._asked(url, "GET", stream=True) as response:
            file = bundle.spooled(self._environment, response.iter_content(_CHUNK), self.shown)
        if f"sha256:{bundle.sha256_of(file)}" != digest:
            raise place.BadStore(f"{self.shown}: the blob {digest} was changed")
        return file

    def _publish(self, file: BinaryIO) -> None:
        """Upload the bundle, then the manifest of the tag."""
        if self._manifest()[1] != self._seen:
            raise place.Changed(self.shown)
        digest = f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}"
        empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest, "size": len(_EMPTY)}
        layer = {"mediaType": _BUNDLE, "digest": f"sha256:{bundle.sha256_of(file)}", "size": file.tell()}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _BUNDLE,
            "config": empty,
            "layers": [layer],
        }
        file.seek(0)
        self._upload(layer["digest"], file)
        self._upload(digest, _EMPTY)
        text = json.dumps(manifest, sort_keys=True).encode()
        url = self._url(self._container.manifest_url())
        self._asked(url, "PUT", data=text, headers={"Content-Type": _MANIFEST})

    def _upload(self, digest: object, data: bytes | BinaryIO) -> None:
        # The first request logs in, so that no body is sent twice.
        started = self._asked(self._url(self._container.upload_blob_url()), "POST")
        place = urljoin(started.url, started.headers.get("Location", ""))
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": digest})
        self._asked(place, "PUT", data=data, headers={"Content-Type": "application/octet-stream"})

    def _manifest(self) -> tuple[Any, str | None]:
        """Return the manifest of the tag, and its digest; nothing if there is none."""
        headers = {"Accept": _MANIFEST}
        response = self._asked(self._url(self._container.manifest_url()), "GET", headers=headers, stream=True)
        if response.status_code == HTTPStatus.NOT_FOUND:
            return None, None
        with self._translated():
            text = response.raw.read(_LARGEST_MANIFEST + 1, decode_content=True)
        try:
            return json.loads(text), hashlib.sha256(text).hexdigest()
        except (ValueError, RecursionError) as error:
            raise place.BadStore(f"{self.shown} is not a bundle of cachectl; choose another tag") from error

    def _url(self, path: str) -> str:
        return f"{self._registry.prefix}://{path}"

    def _asked(self, url: str, method: str, **given: Any) -> Any:  # noqa: ANN401 - an answer of requests
        """Send a request. Raises :class:`TransferFailed` for a status that is a failure, except 404 of a manifest."""
        with self._translated():
            response = self._registry.do_request(url, method, **given)
        missing = response.status_code == HTTPStatus.NOT_FOUND and "/manifests/" in url and method == "GET"
        if response.status_code >= HTTPStatus.MULTIPLE_CHOICES and not missing:
            verb = "read" if method == "GET" else "write"
            advice = f"check the address, and log in with docker login or podman login as a user who may {verb} it"
            raise place.TransferFailed(f"cannot {verb} {self.shown}: status {response.status_code}; {advice}")
        return response

    def _translated(self) -> AbstractContextManager[None]:
        return place.translated(self._failure)

    def _failure(self, error: Exception) -> place.TransferFailed:
        """Return an error of oras or requests as one line."""
        if isinstance(error, ImportError):
            return place.TransferFailed("oci:// needs the package oras: pip install 'opencl-cachectl[oci]'")
        # Requests wraps the reason into the pool and the path.
        reason = getattr(next(iter(error.args), None), "reason", None) or error
        why = errors.printable(" ".join(str(reason).split()))[:_LONGEST_REASON] or type(error).__name__
        return place.TransferFailed(
            f"cannot reach {self.shown}: {why}; check the address and the network, and try again"
        )
