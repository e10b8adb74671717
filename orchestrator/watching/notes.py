"""Events that the processes of a trace recorded, read without trust: the traced program can write to the folder too.

Only plain files are read, up to a limit and without blocking. An event counts only if every field has its type. Unread
files are named, and the numbers of the trace are then lower bounds.
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


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_NUMBER


def _seconds(value: object) -> bool:
    # NaN fails every comparison.
    return type(value) in (int, float) and 0 <= value <= _LARGEST_NUMBER  # type: ignore[operator]


def _intervals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_number, pair)) and pair[0] <= pair[1]  # noqa: PLR2004
        for pair in value
    )


def _flag(value: object) -> bool:
    return isinstance(value, bool)


#: The fields that every event of a kind must have.
_REQUIRED: Final[Mapping[str, Sequence[str]]] = {
    "started": (),
    "failed": ("library",),
    **dict.fromkeys(("hit", "miss", "store"), ("layer",)),
    "build": ("layer", "seconds", "failed", "heard"),
    "span": ("stage", "name", "start", "end", "thread"),
    "messages": ("layer", "lookups", "wrote", "upto"),
}
#: The types of the fields that are used.
_TYPES: Final[Mapping[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("error", "kind", "host", "library", "layer", "name"), _text),
    **dict.fromkeys(("pid", "monotonic", "epoch", "start", "end", "thread", "upto"), _number),
    **dict.fromkeys(("at", "seconds"), _seconds),
    **dict.fromkeys(("failed", "heard"), _flag),
    **dict.fromkeys(("program", "wrote"), _texts),
    "stage": STAGES.__contains__,
    "compiles": _intervals,
}
#: Those of fields that may also be unknown.
_TYPES_IF_KNOWN: Final[Mapping[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("dictionary", "key", "source", "options", "platform", "driver"), _text),
    **dict.fromkeys(("kernels", "devices"), _texts),
    **dict.fromkeys(("bytes", "rank", "lookups"), _number),
    "binary": ("hit", "miss").__contains__,
    "compiled": _flag,
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
        said = (event for event in events if event["event"] == "messages" and str(event["pid"]) == path.stem)
        try:
            yield _read(path, max((event["upto"] for event in said), default=0), _MOST_MESSAGES)[0]
        except OSError:
            continue


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix) and _FILE.fullmatch(name)]


def _read(path: Path, start: int, most: int) -> tuple[bytes, bool]:
    """Return a part of a plain file, and whether it reaches the end. Raises :class:`OSError`."""
    with os.fdopen(open_plain(path), "rb") as file:
        file.seek(start)
        return file.read(most), not file.read(1)


def _event(line: bytes) -> Event | None:
    """Return an event in which every field is valid; ``None`` if the line holds none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or "pid" not in event or not _text(event.get("event")):
        return None
    required = _REQUIRED.get(event["event"])
    if required is None or not event.keys() >= set(required):
        return None
    for name, value in event.items():
        check = _TYPES.get(name) or (None if value is None else _TYPES_IF_KNOWN.get(name))
        if check is not None and not check(value):
            return None
    return event
