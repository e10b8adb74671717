"""Damaged things moved aside, inside the root they lay in: dated, listed, and put back as they were.

Each has a folder of its own, named for its layer and the moment, with a label (what it is, where it lay, what is
wrong with it) and the thing itself. The label is written first and the thing follows by one rename, so that it is
in its place or in quarantine, whatever happens in between. A folder that holds nothing but its label holds nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from cachectl.layers.errors import Damaged, LayerError, Unreachable
from cachectl.layers.facts import Finding, Quarantined, Target
from cachectl.layers.stores.handles import delete, is_held, opened, opened_root, own_folder, status_of, write_synced
from cachectl.layers.stores.plain import STAGE, read_plain

_PREFIX: Final = ".cachectl-quarantine-"
_NAME: Final = r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}"
_LABEL: Final = "label.json"
_SCHEMA: Final = "cachectl/quarantined/1"
#: More than any label holds, in bytes.
_LARGEST: Final = 1 << 20


def folder_pattern(layer: str) -> re.Pattern[str]:
    """Return what the names of a layer's quarantine folders match."""
    return re.compile(f"{re.escape(_PREFIX + layer)}-({_NAME})")


def label(root: Path, target: Target, finding: Finding, moment: float) -> Quarantined:
    """Describe what is about to be moved aside, and name it by the moment (epoch seconds)."""
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(moment))
    return Quarantined(
        name=f"{date}-{uuid.uuid4().hex[:8]}",
        layer=finding.layer,
        root=root,
        key=target.key,
        bytes=target.bytes,
        moved=moment,
        code=finding.code,
        message=finding.message,
    )


class Quarantine:
    """What one layer has in quarantine in one root."""

    def __init__(self, layer: str, root: Path) -> None:
        self.layer = layer
        self.root = root

    def held(self) -> Iterator[Quarantined]:
        """Yield everything in quarantine, the oldest first."""
        pattern = folder_pattern(self.layer)
        with self._translated("be read"), opened_root(self.root) as handle:
            names = [] if handle is None else sorted(filter(pattern.fullmatch, os.listdir(handle)))
            for name in names:
                with suppress(FileNotFoundError, NotADirectoryError):
                    if handle is not None and not is_held(handle, name):
                        with opened(name, handle) as folder:
                            yield from self._described(name, folder)

    def _described(self, name: str, folder: int) -> Iterator[Quarantined]:
        if set(os.listdir(folder)) - {_LABEL}:
            described = read_label(read_plain(_LABEL, dir_fd=folder, limit=_LARGEST), self.root)
            if described is not None and _folder_name(described) == name:
                yield described

    @contextmanager
    def shelf(self, handle: int, thing: Quarantined) -> Iterator[int]:
        """Make the folder of a thing under an open root, for the thing to be moved into; yield its descriptor.

        It goes again where nothing was moved in.
        """
        name = _folder_name(thing)
        with own_folder(handle, STAGE) as (folder, stage):
            write_synced(folder, _LABEL, write_label(thing))
            os.rename(stage, name, src_dir_fd=handle, dst_dir_fd=handle)
            try:
                yield folder
                os.fsync(folder)
            finally:
                if os.listdir(folder) == [_LABEL]:
                    delete(handle, name)
        os.fsync(handle)

    @contextmanager
    def taken(self, thing: Quarantined) -> Iterator[int]:
        """Open the folder of a thing while it is put back; when that is done, the folder goes."""
        name = _folder_name(thing)
        with self._translated("be put back"), opened_root(self.root) as handle:
            if handle is None:
                raise LayerError(self.layer, f"{thing.name} is not in quarantine any more", self.root)
            with opened(name, handle) as folder:
                yield folder
            delete(handle, name)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except LayerError:
            raise
        except OSError as error:
            raise Unreachable(self.layer, f"cannot {what}: {error.strerror or error}", self.root) from error


def demand(layer: str, folder: int, name: str) -> None:
    """See that an open quarantine folder holds what its label says. Raises :class:`Damaged` where it does not."""
    if status_of(folder, name) is None:
        raise Damaged(layer, f"the quarantine folder does not hold {name!r}, as its label says")


def write_label(thing: Quarantined) -> bytes:
    """Spell a label as JSON."""
    known = asdict(thing)
    del known["root"]
    return json.dumps({"schema": _SCHEMA, **known, "lay in": os.fspath(thing.root)}, indent=1).encode()


def read_label(data: bytes, root: Path) -> Quarantined | None:
    """Read a label found in a root; ``None`` where it is none."""
    try:
        known = json.loads(data)
        fields = {name: known[name] for name in ("name", "layer", "key", "bytes", "moved", "code", "message")}
        schema = known["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = all(isinstance(fields[name], str) for name in ("name", "layer", "key", "code", "message"))
    numbers = type(fields["bytes"]) is int and type(fields["moved"]) in (int, float)
    if schema != _SCHEMA or not texts or not numbers:
        return None
    return Quarantined(root=root, **fields)


def _folder_name(thing: Quarantined) -> str:
    return f"{_PREFIX}{thing.layer}-{thing.name}"
