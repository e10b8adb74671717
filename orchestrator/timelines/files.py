"""Files of timelines: written in the form that their names end with, and read again."""

from __future__ import annotations

from typing import Final

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.disk.plain import read_plain
from cachectl.observing.timeline import Timeline
from cachectl.output_files import PAGE, Kind
from cachectl.timelines import chrome

#: Limit on the bytes of a file that is read: a million spans.
_LARGEST: Final = 1 << 28


#: What ``trace --timeline`` may replace.
TIMELINE: Final = Kind(
    "a timeline", lambda head: head.startswith(chrome.HEAD) or PAGE.is_begun_by(head), is_binary=False
)


def check(name: str) -> None:
    """Raise :class:`BadRequest` if the name of a file does not say its form."""
    if not name.endswith((".json", ".html")):
        message = f"{name!r}: the name of a timeline ends in .json (Chrome trace format) or .html (a page)"
        raise BadRequest(message)


def encode(timeline: Timeline, name: str) -> bytes:
    """Return the file of a timeline, in the form that its name says."""
    check(name)
    if name.endswith(".json"):
        return chrome.encode(timeline)
    from cachectl.observing.page import page

    return page(timeline)


def read(name: str) -> Timeline:
    """Read a file in the Chrome trace format. Raises :class:`BadRequest` if it is no timeline, :class:`OSError`."""
    if not name.endswith(".json"):
        message = f"{name!r}: only timelines in .json files can be compared"
        raise BadRequest(message)
    return chrome.decode(read_plain(name, limit=_LARGEST), name)
