"""A timeline as one self-contained HTML page: rows of processes and threads, kernels to search for, a summary."""

from __future__ import annotations

import shlex
from typing import Final

from cachectl.observing.timeline import STAGES, Span, Timeline
from cachectl.pages.skeleton import Words, build_page

#: Digits behind the point: nanoseconds.
_DIGITS: Final = 9


def page(timeline: Timeline) -> bytes:
    """Return the page of a timeline, with all its spans. It requests nothing, so it can be sent and kept as a file."""
    words = Words()
    spans = [_row(span, words) for span in timeline.spans]
    other = dict.fromkeys(span.stage for span in timeline.spans if span.stage not in STAGES)
    data = {
        "command": shlex.join(timeline.command),
        "started": timeline.started,
        "wall": timeline.wall_seconds,
        "stages": [*STAGES, *other],
        "processes": [[one.process, one.command, one.host, one.rank] for one in timeline.processes],
        "spans": spans,
        "words": list(words),
    }
    return build_page("timeline", "cachectl trace: timeline", data)


def _row(span: Span, words: Words) -> list[object]:
    """Return a span as the script reads it: texts by their numbers among the words, seconds rounded."""
    texts = (span.stage, span.name, span.layer, span.kernel, span.outcome)
    numbers = [None if text is None else words[text] for text in texts]
    times = (round(span.start, _DIGITS), round(span.seconds, _DIGITS))
    return [span.process, span.thread, *numbers, *times, span.bytes]
