"""Events that the processes of a trace recorded, read without trust: the traced program can write to the folder too.

Only plain files of this user are read, up to a limit and without blocking. An event counts only if every field has its
type. Unread files are named, and the numbers of the trace are then lower bounds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachectl.layers.disk.plain import open_plain
from cachectl.watching.timeline import STAGES

#: Limit on the bytes read of all processes together: some 400,000 events.
_MOST: Final = 128 << 20
#: Limit on the bytes passed on from one process's error stream.
_MOST_MESSAGES: Final = 16 << 20
_LARGEST_NUMBER: Final = 1 << 62
_FILE: Final = re.compile(r"([0-9]{1,20})\.(?:events|messages)")

Event = Mapping[str, Any]
_Check = Callable[[object], bool]


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_NUMBER


def _seconds(value: object) -> bool:
    # NaN fails every comparison.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LARGEST_NUMBER


def _intervals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, list) and len(one) == len(("start", "end")) and all(map(_number, one)) and one[0] <= one[1]
        for one in value
    )


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _or_unknown(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


#: The fields that are used: those that every event of a kind must have, then those it may have.
_REQUIRED: Final[Mapping[str, Mapping[str, _Check]]] = {
    "started": {},
    "failed": {"library": _text},
    "hit": {"layer": _text},
    "miss": {"layer": _text},
    "store": {"layer": _text},
    "build": {"layer": _text, "seconds": _seconds, "failed": _flag, "heard": _flag},
    "span": {"stage": STAGES.__contains__, "name": _text, "start": _number, "end": _number, "thread": _number},
    "messages": {"layer": _text, "lookups": _or_unknown(_number), "wrote": _texts, "upto": _number},
}
_OPTIONAL: Final[Mapping[str, _Check]] = {
    **dict.fromkeys(("error", "kind", "host"), _text),
    **dict.fromkeys(("dictionary", "key", "source", "options", "platform", "driver"), _or_unknown(_text)),
    **dict.fromkeys(("kernels", "devices"), _or_unknown(_texts)),
    **dict.fromkeys(("monotonic", "epoch", "start", "end", "thread"), _number),
    **dict.fromkeys(("bytes", "rank"), _or_unknown(_number)),
    "program": _texts,
    "at": _seconds,
    "binary": lambda value: value in (None, "hit", "miss"),
    "compiled": _or_unknown(_flag),
    "compiles": _intervals,
}


@dataclass
class Noted:
    """The events of a run, process by process, and why some could not be read (a line each)."""

    events: list[Event] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def read_events(folder: Path) -> Noted:
    """Read the events of every process. Nothing in the folder makes this raise or wait."""
    noted = Noted()
    left = _MOST
    for path in _files(folder, ".events"):
        try:
            data, whole = _read(path, 0, left)
        except OSError as error:
            noted.unread.append(f"{path.name}: {error.strerror}")
            continue
        left -= len(data)
        lines = data.split(b"\n")
        # An incomplete last line was cut here, or while it was written.
        events = [_event(line) for line in lines[:-1]]
        noted.events += [event for event in events if event is not None]
        if not whole:
            noted.unread.append(f"{path.name}: over the limit on the size of a trace")
        elif lines[-1] or None in events:
            noted.unread.append(f"{path.name}: lines that are no events")
    return noted


def messages_after(folder: Path, events: Sequence[Event]) -> Iterator[bytes]:
    """Yield the end of each process's messages: those after the last event that accounts for them."""
    for path in _files(folder, ".messages"):
        accounted = (
            event["upto"] for event in events if event["event"] == "messages" and str(event["pid"]) == path.stem
        )
        try:
            yield _read(path, max(accounted, default=0), _MOST_MESSAGES)[0]
        except OSError:
            continue


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix) and _FILE.fullmatch(name)]


def _read(path: Path, start: int, most: int) -> tuple[bytes, bool]:
    """Return a part of a plain file of this user, and whether it reaches the end. Raises :class:`OSError`."""
    handle = open_plain(path)
    try:
        status = os.fstat(handle)
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise PermissionError(1, "belongs to another user", str(path))
        wanted = min(most, max(0, status.st_size - start))
        data = b""
        while len(data) < wanted and (more := os.pread(handle, min(wanted - len(data), 1 << 20), start + len(data))):
            data += more
        return data, start + len(data) >= status.st_size
    finally:
        os.close(handle)


def _event(line: bytes) -> Event | None:
    """Return an event in which every field is valid; ``None`` if the line holds none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not _number(event.get("pid")):
        return None
    kind = event.get("event")
    required = _REQUIRED.get(kind) if isinstance(kind, str) else None
    if required is None or not all(name in event and check(event[name]) for name, check in required.items()):
        return None
    return event if all(check(event[name]) for name, check in _OPTIONAL.items() if name in event) else None
