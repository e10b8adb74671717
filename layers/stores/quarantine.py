"""Quarantine of damaged things, inside their root: dated, listed, and restored unchanged.

Each thing has a folder, named after its layer and the time, with a label (kind, place and damage) and the thing. The
label is written first and the thing follows by one rename, so that after any interruption it is either in its place or
in quarantine. A folder with only a label counts as empty.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachectl.layers.base import facts
from cachectl.layers.base.errors import Busy, Damaged, LayerError, Refused, Unreachable, Unsettled, reason_of
from cachectl.layers.base.facts import Problem
from cachectl.layers.base.lazy import regex
from cachectl.layers.disk.atomic import write_synced
from cachectl.layers.disk.handles import (
    NO_ROOM,
    delete,
    is_held,
    is_trusted,
    opened,
    opened_root,
    own_folder,
    status_of,
)
from cachectl.layers.disk.locking import take_flock
from cachectl.layers.disk.plain import STAGE, read_plain

_PREFIX: Final = ".cachectl-quarantine-"
_NAME: Final = r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}"
_LABEL: Final = "label.json"
_SCHEMA: Final = "cachectl/quarantined/1"
#: Limits on the bytes of a label and the length of a message.
_LARGEST: Final = 1 << 20
_LONGEST: Final = 500
#: Limits on sizes (bytes) and dates (epoch seconds).
_MOST: Final = 1 << 63
_LATEST: Final = 1 << 40


def folder_pattern(layer: str) -> re.Pattern[str]:
    """Return the pattern of the names of a layer's quarantine folders."""
    return regex(f"{re.escape(_PREFIX + layer)}-({_NAME})")


def label(root: Path, target: facts.Target, finding: facts.Finding, moment: float) -> facts.Quarantined:
    """Return the label of a thing to be quarantined, named after the time (epoch seconds)."""
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(moment))
    return facts.Quarantined(
        name=f"{date}-{os.urandom(4).hex()}",
        layer=finding.layer,
        root=root,
        key=target.key,
        bytes=target.bytes,
        moved=moment,
        code=finding.code,
        message=finding.message[:_LONGEST],
    )


@dataclass
class Shelf:
    """The open quarantine folder of a thing; ``taken`` says whether the thing has left its place."""

    handle: int
    taken: bool = False


class Quarantine:
    """The quarantine of one layer in one root."""

    def __init__(self, layer: str, root: Path) -> None:
        self.layer = layer
        self.root = root

    def held(self) -> Iterator[facts.Quarantined | Problem]:
        """Yield everything in quarantine, the oldest first; a folder without a readable label is a problem."""
        pattern = folder_pattern(self.layer)
        with self._translated("look into quarantine"), opened_root(self.root) as handle:
            for name in [] if handle is None else sorted(filter(pattern.fullmatch, os.listdir(handle))):
                if handle is not None:
                    yield from self._held_one(handle, name)

    def _held_one(self, handle: int, name: str) -> Iterator[facts.Quarantined | Problem]:
        try:
            with opened(name, handle) as folder:
                if not is_trusted(handle, os.fstat(folder)):
                    message = "was put there by another user, or others may write to it; left alone"
                    yield Problem(self.root / name, "foreign", message)
                elif not is_held(handle, name):
                    yield from self._described(name, folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            yield Problem(self.root / name, "unreadable", f"cannot be read: {error.strerror}")

    def _described(self, name: str, folder: int) -> Iterator[facts.Quarantined | Problem]:
        if set(os.listdir(folder)) - {_LABEL}:
            described = read_label(read_plain(_LABEL, dir_fd=folder, limit=_LARGEST), self.root)
            if described is not None and described.layer == self.layer and _folder_name(described) == name:
                yield described
            else:
                yield Problem(self.root / name, "label", "has no readable label")

    @contextmanager
    def shelf(self, handle: int, thing: facts.Quarantined) -> Iterator[Shelf]:
        """Make the quarantine folder of a thing under an open root.

        It is removed if nothing was moved in. Raises :class:`Unsettled` for an error after the thing was taken.
        """
        name, text = _folder_name(thing), write_label(thing)
        if len(text) >= _LARGEST:
            raise Damaged(self.layer, "its key is too long to be kept in quarantine; purge it", thing.root)
        shelf: Shelf | None = None
        try:
            with own_folder(handle, STAGE) as (folder, stage):
                shelf = Shelf(folder)
                write_synced(folder, _LABEL, text)
                os.rename(stage, name, src_dir_fd=handle, dst_dir_fd=handle)
                try:
                    yield shelf
                    os.fsync(folder)
                finally:
                    if not shelf.taken and os.listdir(folder) == [_LABEL]:
                        delete(handle, name)
            os.fsync(handle)
        except (LayerError, OSError) as error:
            if shelf is None or not shelf.taken or isinstance(error, Unsettled):
                raise
            raise Unsettled(self.layer, f"moved aside, but then: {reason_of(error)}", self.root) from error

    @contextmanager
    def taken(self, thing: facts.Quarantined) -> Iterator[int]:
        """Open the folder of a thing while it is restored, then remove the folder."""
        name = _folder_name(thing)
        with self._translated("put it back"), opened_root(self.root) as handle, ExitStack() as stack:
            try:
                folder = None if handle is None else stack.enter_context(opened(name, handle))
            except FileNotFoundError:
                folder = None
            if handle is None or folder is None or status_of(folder, _LABEL) is None:
                raise LayerError(self.layer, f"{thing.name} is not in quarantine any more", self.root)
            if not is_trusted(handle, os.fstat(folder)):
                raise Refused(self.layer, "was put there by another user, or others may write to it", self.root / name)
            if not take_flock(folder):
                raise Busy(self.layer, f"another cachectl is bringing {thing.name} back", self.root)
            yield folder
            try:
                delete(handle, name)
            except OSError as error:
                # It is empty, so a purge removes it.
                message = f"is back, but its folder in quarantine was not removed: {error.strerror}"
                raise Unsettled(self.layer, message, self.root / name) from error

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except LayerError:
            raise
        except OSError as error:
            advice = "; make room and try again" if error.errno in NO_ROOM else ""
            raise Unreachable(self.layer, f"cannot {what}: {error.strerror or error}{advice}", self.root) from error


def demand(layer: str, folder: int, name: str) -> None:
    """Raise :class:`Damaged` if an open quarantine folder does not hold a plain file ``name``."""
    status = status_of(folder, name)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise Damaged(layer, f"the quarantine folder does not hold the file {name!r}, as its label says")


def write_label(thing: facts.Quarantined) -> bytes:
    """Return a label as JSON."""
    import json
    from dataclasses import asdict

    known = asdict(thing)
    del known["root"]
    return json.dumps({"schema": _SCHEMA, **known, "lay in": os.fspath(thing.root)}, indent=1).encode()


def read_label(data: bytes, root: Path) -> facts.Quarantined | None:
    """Read a label found in a root; ``None`` if it is invalid."""
    import json

    try:
        known = json.loads(data, parse_constant=_no_number)
        fields = {name: known[name] for name in ("name", "layer", "key", "bytes", "moved", "code", "message")}
        schema = known["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = all(isinstance(fields[name], str) for name in ("name", "layer", "key", "code", "message"))
    numbers = _is_count(fields["bytes"], _MOST, int) and _is_count(fields["moved"], _LATEST, int, float)
    if schema != _SCHEMA or not texts or not numbers:
        return None
    return facts.Quarantined(root=root, **fields)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _is_count(value: object, most: int, *kinds: type) -> bool:
    return type(value) in kinds and isinstance(value, (int, float)) and 0 <= value < most


def folder_of(thing: facts.Quarantined) -> Path:
    """Return the quarantine folder of a thing."""
    return thing.root / _folder_name(thing)


def _folder_name(thing: facts.Quarantined) -> str:
    return f"{_PREFIX}{thing.layer}-{thing.name}"
