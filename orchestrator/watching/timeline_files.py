"""Timelines as files: in the Chrome trace format, which Perfetto and ``about:tracing`` open, or as one HTML page.

Source: "Trace Event Format" (Google, 2016): complete events (``ph`` ``X``, with ``ts`` and ``dur`` in microseconds) and
metadata events (``M``). Viewers ignore the keys of ``otherData``, which has what the format has no place for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from cachectl import output_files
from cachectl.layers.base import errors
from cachectl.watching.timeline import STAGES, Span, Timeline

SCHEMA: Final = "cachectl/timeline/1"
#: The beginning of such a file, in any version.
_HEAD: Final = b'{"otherData":{"schema":"cachectl/timeline/'
#: What ``trace --timeline`` may replace.
TIMELINE: Final = output_files.Kind(
    "a timeline", lambda head: head.startswith(_HEAD) or output_files.PAGE.is_begun_by(head), is_binary=False
)
#: The fields of a span that are arguments of its event.
_ARGUMENTS: Final = ("kernel", "layer", "outcome", "bytes")


def check(name: str) -> None:
    """Raise :class:`BadRequest` if the name of a file does not say its form."""
    if not name.endswith((".json", ".html")):
        message = f"{name!r}: the name of a timeline ends in .json (Chrome trace format) or .html (a page)"
        raise errors.BadRequest(message)


def encode(timeline: Timeline, name: str) -> bytes:
    """Return the file of a timeline, in the form that its name says, which :func:`check` has seen."""
    if name.endswith(".html"):
        return page(timeline)
    document = {
        # The first bytes say that cachectl wrote it.
        "otherData": {
            "schema": SCHEMA,
            "command": list(timeline.command),
            "started": timeline.started,
            "wall_seconds": timeline.wall_seconds,
            "processes": [asdict(process) for process in timeline.processes],
        },
        "displayTimeUnit": "ms",
        "traceEvents": [*_metadata(timeline), *map(_complete, timeline.spans)],
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _metadata(timeline: Timeline) -> Iterator[dict[str, object]]:
    threads: dict[int, dict[int, None]] = {}
    for span in timeline.spans:
        threads.setdefault(span.process, {})[span.thread] = None
    for index, process in enumerate(timeline.processes):
        rank = "" if process.rank is None else f"rank {process.rank}: "
        about = {"process_name": {"name": f"{rank}{process.command}"}, "process_sort_index": {"sort_index": index}}
        about |= {"process_labels": {"labels": process.host}} if process.host else {}
        for name, arguments in about.items():
            yield {"name": name, "ph": "M", "pid": process.process, "tid": 0, "args": arguments}
        for number, thread in enumerate(threads.get(process.process, ())):
            title = {"name": "main" if thread == process.process else f"thread {number}"}
            yield {"name": "thread_name", "ph": "M", "pid": process.process, "tid": thread, "args": title}


def _complete(span: Span) -> dict[str, object]:
    return {
        "name": span.name,
        "cat": span.stage,
        "ph": "X",
        "ts": round(span.start * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "pid": span.process,
        "tid": span.thread,
        "args": {name: value for name in _ARGUMENTS if (value := getattr(span, name)) is not None},
    }


def page(timeline: Timeline) -> bytes:
    """Return one HTML page with all spans. It requests nothing, so it can be sent and kept as a file."""
    from cachectl.pages import build_page, numbered

    words, spans = numbered(), []
    for span in timeline.spans:
        # Texts are written once, and spans have their numbers; seconds are rounded to nanoseconds.
        texts = (span.stage, span.name, span.layer, span.kernel, span.outcome)
        numbers = [None if text is None else words[text] for text in texts]
        spans.append([span.process, span.thread, *numbers, round(span.start, 9), round(span.seconds, 9), span.bytes])
    data = {
        "command": shlex.join(timeline.command),
        "started": timeline.started,
        "wall": timeline.wall_seconds,
        "stages": list(STAGES),
        "processes": [[one.process, one.command, one.host, one.rank] for one in timeline.processes],
        "spans": spans,
        "words": list(words),
    }
    return build_page("timeline", "cachectl trace: timeline", data)
