"""Deterministic tars: the bytes of an entry of several files, and the file that ``cachectl get`` writes."""

from __future__ import annotations

import io
from collections.abc import Mapping

from cachectl.layers.base.errors import PARSE_ERRORS, CachectlError
from cachectl.layers.core.entry import Artifact

_HEADER = "artifact.json"
_DATA = "data"
#: Type flags of a regular file in old and new tars.
_PLAIN = (b"0", b"\0")
_SCHEMA = "cachectl/artifact/1"


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return a tar that depends only on names and contents, not on times, owners or order."""
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for name in sorted(members):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(members[name]), 0o600
            tar.addfile(info, io.BytesIO(members[name]))
    return packed.getvalue()


def entry_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an entry: its one file if the path of that is empty, else a tar of its files."""
    return files[""] if "" in files else pack(files)


def unpack(data: bytes) -> dict[str, bytes]:
    """Unpack a tar of :func:`pack`. Raises :class:`ValueError` for any other: cut short, or with links or ``..``."""
    import tarfile

    members: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as tar:
            for info in tar:
                parts = [part for part in info.name.split("/") if part not in ("", ".")]
                is_plain = info.type in _PLAIN and not info.sparse and info.size <= len(data)
                if not is_plain or info.name.startswith("/") or ".." in parts or not parts:
                    raise ValueError(f"unsafe member {info.name!r}")
                path = "/".join(parts)
                if path in members:
                    raise ValueError(f"member {info.name!r} appears twice")
                content = tar.extractfile(info)
                members[path] = content.read() if content is not None else b""
            # To tarfile a truncated or damaged header is the end, except for the first.
            if data[tar.offset : tar.offset + tarfile.BLOCKSIZE] != bytes(tarfile.BLOCKSIZE):
                raise ValueError("not a tar: it ends before its last block, or is damaged")
    except (tarfile.TarError, EOFError, *PARSE_ERRORS) as error:
        raise ValueError(f"not a tar: {error}") from error
    return members


def artifact_to_bytes(artifact: Artifact) -> bytes:
    """Return an artifact as the file that ``cachectl get`` writes: a tar of ``artifact.json`` and ``data``."""
    import hashlib

    from cachectl.layers.base.documents import encode_json

    header = {
        "schema": _SCHEMA,
        "layer": artifact.layer,
        "key": artifact.key,
        "form": artifact.form,
        "detail": dict(artifact.detail),
        "sha256": hashlib.sha256(artifact.data).hexdigest(),
    }
    return pack({_HEADER: encode_json(header, indent=1, sort_keys=True), _DATA: artifact.data})


def is_artifact_file(head: bytes) -> bool:
    """Return whether bytes are a file of :func:`artifact_to_bytes`, or its beginning."""
    return head.startswith(_HEADER.encode() + b"\0") and f'"schema": "{_SCHEMA}"'.encode() in head


def artifact_from_bytes(data: bytes) -> Artifact:
    """Read a file of ``cachectl get``. Raises :class:`CachectlError` for another file or a wrong checksum."""
    import hashlib

    from cachectl.layers.base.documents import parse_json

    try:
        members = unpack(data)
        header = parse_json(members[_HEADER])
        content = members[_DATA]
        if header["schema"] != _SCHEMA:
            raise ValueError(f"unknown schema {header['schema']!r}")
        layer, key, form, digest = (str(header[name]) for name in ("layer", "key", "form", "sha256"))
        detail = {str(name): str(value) for name, value in header["detail"].items()}
    except PARSE_ERRORS as error:
        raise CachectlError(f"not an artifact file of cachectl get: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CachectlError("the artifact file is damaged: wrong checksum")
    return Artifact(layer, key, form, content, detail)
