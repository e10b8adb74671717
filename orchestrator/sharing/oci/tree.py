"""File trees as layers of OCI images: the same files give the same bytes.

Members of a layer are sorted, and have no time, owner or mode of their own. A layer may hold only the difference from
those below it: new and changed files, and a *whiteout* for each removed path.

Source: https://github.com/opencontainers/image-spec/blob/v1.1.1/layer.md
"""

from __future__ import annotations

import gzip
import hashlib
import os
import posixpath
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

#: The path of each file with the SHA-256 of its content, and of each folder with an empty text.
Tree = dict[str, str]

LAYER_TYPE: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
_FILE_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755
_WHITEOUT: Final = ".wh."
#: A compromise of time and size. Another level changes the bytes of every layer.
_LEVEL: Final = 6
_CHUNK: Final = 1 << 20


class ForeignLayer(ValueError):
    """A layer that :func:`write_layer` did not write."""


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    """A compressed layer: its digest, its size in bytes, and the digest of the tar in it."""

    digest: str
    bytes: int
    diff_id: str


def read_tree(root: Path) -> Tree:
    """Return the files and folders of a folder that nobody else changes; anything else in it is left out."""
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        tree.update(
            {(inside / name).as_posix(): "" for name in folders if not os.path.islink(os.path.join(folder, name))}
        )
        for name in files:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    tree[(inside / name).as_posix()] = _sha256(file)
    return tree


def write_layer(file: BinaryIO, root: Path, tree: Tree, below: Tree) -> WrittenLayer:
    """Write what a tree has beyond the one below it, and a whiteout for what it lacks of that one."""
    tar_digest = hashlib.sha256()
    changed = {path for path, digest in tree.items() if below.get(path) != digest}
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=file, mtime=0) as packed,
        tarfile.open(mode="w|", fileobj=cast("Any", _Hashing(packed, tar_digest)), format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(changed | _removed(tree, below)):
            if path not in changed:
                folder, name = posixpath.split(path)
                tar.addfile(_member(posixpath.join(folder, _WHITEOUT + name)))
            elif tree[path]:
                with open(root / path, "rb") as content:
                    tar.addfile(_member(path, os.fstat(content.fileno()).st_size), content)
            else:
                tar.addfile(_member(path, folder=True))
    size = file.tell()
    file.seek(0)
    return WrittenLayer(f"sha256:{_sha256(file)}", size, f"sha256:{tar_digest.hexdigest()}")


def apply_layer(file: BinaryIO, tree: Tree, most: int) -> None:
    """Apply a layer to the tree below it.

    Raises :class:`ForeignLayer` for one that :func:`write_layer` would not have written, or with more than ``most``
    bytes of tar.
    """
    try:
        with (
            gzip.GzipFile(fileobj=file) as packed,
            tarfile.open(mode="r|", fileobj=cast("Any", _Limited(packed, most))) as tar,
        ):
            for member in tar:
                _apply(member, tar, tree)
    except (tarfile.TarError, zlib.error, EOFError, OSError, UnicodeError) as error:
        raise ForeignLayer(str(error)) from error


def _apply(member: tarfile.TarInfo, tar: tarfile.TarFile, tree: Tree) -> None:
    folder, name = posixpath.split(member.name)
    expected = _member(member.name, member.size, folder=member.isdir())
    if any(getattr(member, field) != getattr(expected, field) for field in ("type", "mode", "uid", "gid", "mtime")):
        raise ForeignLayer(member.name)
    if name.startswith(_WHITEOUT):
        _drop(tree, posixpath.join(folder, name[len(_WHITEOUT) :]))
    elif member.isdir():
        tree[member.name] = ""
    else:
        if tree.get(member.name) == "":
            # It replaces a folder.
            _drop(tree, member.name)
        tree[member.name] = _sha256(cast("BinaryIO", tar.extractfile(member)))


def _drop(tree: Tree, gone: str) -> None:
    for path in [path for path in tree if path == gone or path.startswith(f"{gone}/")]:
        del tree[path]


def _removed(tree: Tree, below: Tree) -> set[str]:
    """Return the removed paths whose folder stays: a whiteout of a folder removes what is in it."""
    gone = below.keys() - tree.keys()
    # A file in place of a folder, or a folder in place of a file, replaces it without a whiteout.
    return {
        path for path in gone if posixpath.dirname(path) not in gone and tree.get(posixpath.dirname(path), "") == ""
    }


def _member(path: str, size: int = 0, *, folder: bool = False) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type = tarfile.DIRTYPE if folder else tarfile.REGTYPE
    member.mode = _FOLDER_MODE if folder else _FILE_MODE
    member.size = size
    return member


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(_CHUNK), b""):
        digest.update(chunk)
    return digest.hexdigest()


class _Hashing:
    """A file to write to that also hashes what is written."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, digest: Any) -> None:  # noqa: ANN401 - hashlib names no type
        self._file = file
        self._digest = digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)


class _Limited:
    """A file to read from that has at most ``most`` bytes."""

    def __init__(self, file: gzip.GzipFile, most: int) -> None:
        self._file = file
        self._left = most

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ForeignLayer("too large")
        return data
