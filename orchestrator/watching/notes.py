"""Events that the processes of a trace recorded, read without trust: the traced program can write to the folder too.

Only plain files are read, up to a limit and without blocking. An event counts only if every field has its type. Unread
files are named, and the numbers of the trace are then lower bounds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cachectl.layers.disk.plain import open_plain

#: Limit on the bytes read of all processes together: some 400,000 events.
_MOST: Final = 128 << 20
#: Limit on the bytes passed on from one process's error stream.
_MOST_MESSAGES: Final = 16 << 20
_LARGEST_NUMBER: Final = 1 << 62
_FILE: Final = re.compile(r"([0-9]{1,20})\.(?:events|messages)")

Event = Mapping[str, Any]
_WHEN: Final = ("start", "end", "thread")
#: The fields that every event of a kind must have. Other fields may be missing, or unknown (null).
_REQUIRED: Final[Mapping[str, Sequence[str]]] = {
    "started": ("program", "host"),
    "failed": ("library",),
    **dict.fromkeys(("hit", "miss", "store"), ("layer", *_WHEN)),
    "build": ("layer", "seconds", "failed", "heard", "compiles", *_WHEN),
    "span": ("stage", "name", *_WHEN),
    "messages": ("layer", "wrote", "upto"),
}
#: The fields that are used, each with a value of its form: a list holds values of one form, a tuple one value of each.
_FORMS: Final[Mapping[str, object]] = {
    **dict.fromkeys(("event", "error", "kind", "host", "library", "layer", "name", "stage", "dictionary"), ""),
    **dict.fromkeys(("key", "source", "options", "platform", "driver", "binary"), ""),
    **dict.fromkeys(("pid", "start", "end", "thread", "upto", "bytes", "rank", "lookups"), 0),
    **dict.fromkeys(("at", "seconds"), 0.0),
    **dict.fromkeys(("failed", "heard", "compiled"), False),
    **{name: [""] for name in ("program", "wrote", "kernels", "devices")},
    "compiles": [(0, 0)],
}


def _fits(value: Any, form: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    if type(form) in (int, float):
        return type(value) in (int, type(form)) and 0 <= value <= _LARGEST_NUMBER
    return type(value) is type(form) and "\0" not in str(value)


def read_events(folder: Path) -> tuple[list[Event], list[str]]:
    """Return the events of every process, one after the other, and a line for each file that could not be read.

    Nothing in the folder makes this raise or wait.
    """
    events: list[Event] = []
    unread: list[str] = []
    left = _MOST
    for path in _files(folder, ".events"):
        try:
            data, whole = _read(path, 0, left)
        except OSError as error:
            unread.append(f"{path.name}: {error.strerror}")
            continue
        left -= len(data)
        # An incomplete last line was cut here, or while it was written.
        *lines, rest = data.split(b"\n")
        valid = [event for event in map(_event, lines) if event is not None]
        events += valid
        if not whole:
            unread.append(f"{path.name}: over the limit on the size of a trace")
        elif rest or len(valid) < len(lines):
            unread.append(f"{path.name}: lines that are no events")
    return events, unread


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
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    required = _REQUIRED.get(event["event"])
    if required is None or any(event.get(name) is None for name in ("pid", *required)):
        return None
    used = ((value, _FORMS[name]) for name, value in event.items() if value is not None and name in _FORMS)
    return event if all(_fits(value, form) for value, form in used) else None
