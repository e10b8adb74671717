"""One repository of an OCI registry: blobs by digest, manifests by tag or digest, tags.

The Python package ``oras`` (extra ``oci``) knows the addresses, the credentials and the session. Its own requests have
no time limit, wait two minutes before they report that a server cannot be reached, and keep a token that permits too
little. So the requests are sent here, through that session.

Sources: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md, and ``provider.py`` and ``auth/`` of
oras 0.2.43.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import urlencode, urljoin, urlsplit

from cachectl.layers.base.environment import process_variable
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.texts import printable
from cachectl.layers.host.installing import command_to_install
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.place import BadStore, Missing

if TYPE_CHECKING:
    import requests

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
EMPTY: Final = "application/vnd.oci.empty.v1+json"
#: The file name of a blob. Source: https://github.com/opencontainers/image-spec/blob/v1.1.1/annotations.md
TITLE: Final = "org.opencontainers.image.title"
#: The tag that a manifest was written for. Source: the same.
REFERENCE: Final = "org.opencontainers.image.ref.name"
#: Registries refuse larger manifests. Source: the specification of distribution, "Pushing Manifests".
LARGEST_MANIFEST: Final = 4 << 20
_ADDRESS: Final = re.compile(
    r"oci(?P<plain>\+http)?://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_LOCAL: Final = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
#: Limit on the silence of a server, in seconds.
_SILENCE: Final = 60
#: Statuses after which a request is repeated, and how often. Docker's registry has 500 for a link that it is writing.
_BUSY: Final = (429, 500, 502, 503, 504)
_REPEATS: Final = 3
#: An error code. Source: the specification of distribution, "Error Codes".
_BLOB_UNKNOWN: Final = "MANIFEST_BLOB_UNKNOWN"
_CHUNK: Final = 1 << 18
_TAGS_AT_ONCE: Final = 1000
_LONGEST_REASON: Final = 300


class BlobUnknown(TransferFailed):
    """A manifest names a blob that the registry does not have, or has not completed."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``oci://HOST/NAME:TAG`` or ``oci://HOST/NAME@sha256:…``; ``plain`` is HTTP without TLS."""

    host: str
    name: str
    tag: str
    digest: str | None
    plain: bool

    @classmethod
    def parse(cls, url: str) -> Reference:
        """Read a URL. Without TLS only for this machine, and for ``oci+http://``. Raises :class:`BadRequest`."""
        found = _ADDRESS.fullmatch(url)
        if found is None:
            message = f"{printable(url)[:200]!r} is not of the form oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:HEX"
            if "@" in url.partition("://")[2].partition("/")[0]:
                message = "an oci:// address takes no password; use docker login or podman login"
            raise BadRequest(message)
        host, tag = found["host"], found["tag"] or "latest"
        plain = found["plain"] is not None or _LOCAL.fullmatch(host) is not None
        return cls(host, found["name"], tag, found["digest"], plain)

    def __str__(self) -> str:
        return f"{self._place}:{self.tag}" if self.digest is None else self.pinned(self.digest)

    @property
    def _place(self) -> str:
        scheme = "oci+http" if self.plain and not _LOCAL.fullmatch(self.host) else "oci"
        return f"{scheme}://{self.host}/{self.name}"

    def pinned(self, digest: str) -> str:
        """Return the URL of exactly this content of the repository."""
        return f"{self._place}@{digest}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest with its digest, its media type and its size in bytes."""

    digest: str
    media_type: str
    bytes: int
    content: Mapping[str, Any]


def digest_of(data: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Repository:
    """One repository. Every method raises :class:`TransferFailed` in one line if the registry does not serve it."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        with self._translated():
            from oras.container import Container
            from oras.provider import Registry
            from requests.adapters import HTTPAdapter
            from urllib3.util import Retry

        # Oras guesses which part of an address is the host; here that is known.
        self._container = Container("guess", registry=reference.host)
        self._container.repository = reference.name
        self._registry = Registry(reference.host, insecure=reference.plain)
        self._base = f"{self._registry.prefix}://{reference.host}/"
        self._authorization: dict[str, str] = {}
        repeats = Retry(
            _REPEATS,
            read=_REPEATS - 1,
            backoff_factor=0.5,
            status_forcelist=_BUSY,
            allowed_methods=None,
            raise_on_status=False,
        )
        session = self._registry.session
        session.request = partial(session.request, timeout=_SILENCE)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=repeats))

    # ------------------------------------------------------------------ tags

    def tags(self) -> list[str]:
        """List the tags, with one request for each 1,000; empty if there is no such repository."""
        tags: list[str] = []
        url: str | None = self._url(self._container.tags_url(_TAGS_AT_ONCE))
        while url is not None:
            response = self._ask("GET", url, may=(HTTPStatus.NOT_FOUND,))
            if response.status_code == HTTPStatus.NOT_FOUND:
                return []
            tags += self._json(response).get("tags") or ()
            following = response.links.get("next", {}).get("url")
            url = None if following is None else urljoin(url, following)
        return tags

    # ------------------------------------------------------------------ manifests

    def manifest(self, reference: str) -> Manifest:
        """Return the manifest of a tag or a digest.

        Raises :class:`Missing`, and :class:`BadStore` if it is not the one of that digest, or no JSON object.
        """
        headers = {"Accept": f"{MANIFEST}, {INDEX}"}
        url = self._url(self._container.manifest_url(reference))
        with self._ask("GET", url, may=(HTTPStatus.NOT_FOUND,), headers=headers, stream=True) as response:
            if response.status_code == HTTPStatus.NOT_FOUND:
                raise Missing(f"{self.reference}: nothing has the name {reference}")
            body = io.BytesIO()
            digest = self._copy(response, body, LARGEST_MANIFEST, reference)
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        if reference.startswith("sha256:") and digest != reference:
            raise BadStore(f"{self.reference}: the manifest {reference} was changed: its digest is {digest}")
        try:
            content = json.loads(body.getvalue())
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise BadStore(f"{self.reference}: {reference} is no manifest")
        return Manifest(digest, media_type, body.tell(), content)

    def put_manifest(self, reference: str, content: Mapping[str, Any]) -> Manifest:
        """Write a manifest or an index under a tag, whose blobs and manifests are there; return it.

        Raises :class:`BlobUnknown` if the registry finds a blob missing or incomplete.
        """
        data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        media_type = str(content["mediaType"])
        url = self._url(self._container.manifest_url(reference))
        self._ask("PUT", url, headers={"Content-Type": media_type}, data=data)
        return Manifest(digest_of(data), media_type, len(data), content)

    def described(self, tag: str) -> dict[str, Any] | None:
        """Return the descriptor of the manifest of a tag: media type, digest, size; ``None`` without one."""
        url = self._url(self._container.manifest_url(tag))
        response = self._ask("HEAD", url, may=(HTTPStatus.NOT_FOUND,), headers={"Accept": f"{MANIFEST}, {INDEX}"})
        digest = response.headers.get("Docker-Content-Digest")
        if response.status_code == HTTPStatus.NOT_FOUND or digest is None:
            return None
        size = int(response.headers.get("Content-Length", "0"))
        return {"mediaType": response.headers.get("Content-Type", MANIFEST), "digest": digest, "size": size}

    def delete_manifest(self, digest: str) -> None:
        """Delete a manifest with its tags; the registry collects the blobs that no other manifest names."""
        response = self._ask(
            "DELETE",
            self._url(self._container.manifest_url(digest)),
            may=(HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED),
        )
        if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise TransferFailed(
                f"{self.reference}: the registry does not delete; permit it there, or delete by its own tools"
            )

    # ------------------------------------------------------------------ blobs

    def blob(self, digest: str, most: int) -> bytes:
        """Return a blob of at most ``most`` bytes. Raises :class:`Missing`, and :class:`BadStore` for other bytes."""
        with io.BytesIO() as held:
            self.fetch(digest, held, most)
            return held.getvalue()

    def fetch(self, digest: str, into: BinaryIO, most: int) -> None:
        """Write a blob into an open file; see :meth:`blob`."""
        url = self._url(self._container.get_blob_url(digest))
        headers = {"Accept-Encoding": "identity"}
        with self._ask("GET", url, may=(HTTPStatus.NOT_FOUND,), headers=headers, stream=True) as response:
            if response.status_code == HTTPStatus.NOT_FOUND:
                raise Missing(f"{self.reference}: the blob {digest} is missing")
            found = self._copy(response, into, most, digest)
        if found != digest:
            raise BadStore(f"{self.reference}: the blob {digest} was changed")

    def blob_size(self, digest: str) -> int | None:
        """Return the size of a blob in bytes, ``None`` if it is missing."""
        response = self._ask("HEAD", self._url(self._container.get_blob_url(digest)), may=(HTTPStatus.NOT_FOUND,))
        return (
            None if response.status_code == HTTPStatus.NOT_FOUND else int(response.headers.get("Content-Length", "0"))
        )

    def put_blob(self, digest: str, data: bytes | BinaryIO) -> None:
        """Upload a blob with two requests; the registry takes it only if it has the digest."""
        started = self._ask("POST", self._url(self._container.upload_blob_url()), headers={"Content-Length": "0"})
        place = urljoin(self._base, started.headers.get("Location", ""))
        place += ("&" if urlsplit(place).query else "?") + urlencode({"digest": digest})
        self._ask("PUT", place, headers={"Content-Type": "application/octet-stream"}, data=data)

    # ------------------------------------------------------------------ requests

    def _url(self, path: str) -> str:
        """Return a URL from a path that begins with the host."""
        return f"{self._registry.prefix}://{path}"

    def _ask(self, method: str, url: str, *, may: Collection[int] = (), **given: Any) -> requests.Response:  # noqa: ANN401 - see requests
        """Send a request; statuses below 300 and those in ``may`` are answers, all others are failures."""
        with self._translated():
            response = self._send(method, url, **given)
            if response.status_code == HTTPStatus.UNAUTHORIZED and url.startswith(self._base):
                response.close()
                self._log_in(response)
                if hasattr(given.get("data"), "seek"):
                    given["data"].seek(0)
                response = self._send(method, url, **given)
        if response.status_code >= HTTPStatus.MULTIPLE_CHOICES and response.status_code not in may:
            raise (BlobUnknown if _BLOB_UNKNOWN in response.text else TransferFailed)(self._failure(method, response))
        return response

    def _send(self, method: str, url: str, headers: Mapping[str, str] | None = None, **given: Any) -> requests.Response:  # noqa: ANN401 - see requests
        # An upload may go to another host, which must not see the credentials.
        own = self._authorization if url.startswith(self._base) else {}
        session: requests.Session = self._registry.session
        return session.request(method, url, headers={**(headers or {}), **own}, **given)

    def _log_in(self, response: requests.Response) -> None:
        """Get what the registry asks for: a token for this scope, or the name and password of ``docker login``."""
        from oras.auth import get_auth_backend

        # Oras prints each failure, besides what is raised here.
        logging.getLogger("oras.logger").setLevel(logging.CRITICAL)
        basic = response.headers.get("Www-Authenticate", "").lower().startswith("basic")
        session = self._registry.session
        backend = get_auth_backend("basic" if basic else "token", session, insecure=self.reference.plain)
        backend.load_configs(self._container, configs=_credential_files())
        if basic and not hasattr(backend, "_basic_auth"):
            return
        headers, changed = backend.authenticate_request(response, {})
        self._authorization = headers if changed else {}

    def _copy(self, response: requests.Response, into: BinaryIO, most: int, what: str) -> str:
        """Write a body of at most ``most`` bytes into a file; return its digest."""
        size, digest = 0, hashlib.sha256()
        with self._translated():
            for chunk in response.iter_content(_CHUNK):
                size += len(chunk)
                if size > most:
                    raise BadStore(f"{self.reference}: {what} has more than {most:,} bytes")
                digest.update(chunk)
                into.write(chunk)
        return f"sha256:{digest.hexdigest()}"

    def _json(self, response: requests.Response) -> dict[str, Any]:
        with self._translated():
            found: dict[str, Any] = response.json()
        return found

    def _failure(self, method: str, response: requests.Response) -> str:
        try:
            why = "; ".join(f"{one['code']} {one.get('message', '')}" for one in response.json()["errors"])
        except (ValueError, KeyError, TypeError, AttributeError):
            why = str(response.reason)
        verb = "read" if method in ("GET", "HEAD") else "write"
        advice = "check the address and what the registry permits"
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            advice = f"log in with docker login or podman login {self.reference.host}, as a user who may {verb} it"
        why = printable(" ".join(why.split()))[:_LONGEST_REASON]
        return f"cannot {verb} {self.reference}: status {response.status_code}: {why}; {advice}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the errors of oras and requests into one line."""
        try:
            yield
        except ImportError as error:
            command = command_to_install("oras")
            message = f"oci:// needs the package oras, which is not installed; to add it: {command}"
            raise TransferFailed(message) from error
        except (BadStore, Missing, TransferFailed):
            raise
        # Requests has errors of its own, all of them OSError; oras raises ValueError and others.
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            # Requests wraps the reason into the pool and the path.
            reason = getattr(next(iter(error.args), None), "reason", None) or error
            why = printable(" ".join(str(reason).split()))[:_LONGEST_REASON] or type(error).__name__
            message = f"cannot reach {self.reference}: {why}; check the address and the network, and try again"
            raise TransferFailed(message) from error


def _credential_files() -> list[str]:
    """Return the files of ``docker login`` and ``podman login`` that exist beside the default one, which oras reads."""
    folder, run = process_variable("DOCKER_CONFIG"), process_variable("XDG_RUNTIME_DIR")
    named = (
        folder and os.path.join(folder, "config.json"),
        process_variable("REGISTRY_AUTH_FILE"),
        run and os.path.join(run, "containers", "auth.json"),
    )
    return [path for path in named if path and os.path.isfile(path)]
