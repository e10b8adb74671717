"""Timelines as files in the Chrome trace format, which Perfetto and ``about:tracing`` open.

Source: "Trace Event Format" (Google, 2016): complete events (``ph`` ``X``, with ``ts`` and ``dur`` in microseconds) and
metadata events (``M``). Viewers ignore the keys of ``otherData``, which has what the format has no place for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from cachectl.layers.base.errors import BadRequest
from cachectl.observing.timeline import STAGES, Process, Span, Timeline

T = TypeVar("T")

SCHEMA: Final = "cachectl/timeline/1"
#: The beginning of such a file, in any version.
HEAD: Final = b'{"otherData":{"schema":"cachectl/timeline/'
#: The fields of a span that are arguments of its event.
_ARGUMENTS: Final = ("kernel", "layer", "outcome", "bytes")
_MICROSECOND: Final = 1e-6
#: Numbers beyond this are no time of a run: a million years in seconds.
_LARGEST: Final = 1e14


def encode(timeline: Timeline) -> bytes:
    """Return the file of a timeline."""
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
        if process.host:
            about["process_labels"] = {"labels": process.host}
        for name, arguments in about.items():
            yield {"name": name, "ph": "M", "pid": process.process, "tid": 0, "args": arguments}
        for number, thread in enumerate(threads.get(process.process, ())):
            title = {"name": "main" if thread == process.process else f"thread {number}"}
            yield {"name": "thread_name", "ph": "M", "pid": process.process, "tid": thread, "args": title}


def _complete(span: Span) -> dict[str, object]:
    given = {name: getattr(span, name) for name in _ARGUMENTS}
    return {
        "name": span.name,
        "cat": span.stage,
        "ph": "X",
        "ts": round(span.start / _MICROSECOND, 3),
        "dur": round(span.seconds / _MICROSECOND, 3),
        "pid": span.process,
        "tid": span.thread,
        "args": {name: value for name, value in given.items() if value is not None},
    }


# ---------------------------------------------------------------------- reading


def decode(data: bytes, name: str) -> Timeline:
    """Read such a file, without trust. Raises :class:`BadRequest` with the name if it is none of ours."""
    try:
        document = json.loads(data)
        about = document["otherData"]
        if about["schema"] != SCHEMA:
            message = f"its schema is {about['schema']!r:.40}"
            raise ValueError(message)
        return Timeline(
            tuple(map(_text, about["command"])),
            _number(about["started"]),
            _duration(about["wall_seconds"]),
            tuple(map(_process, about["processes"])),
            tuple(sorted(_read_spans(document["traceEvents"]), key=lambda span: (span.start, -span.seconds))),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        message = f"{name}: no timeline that cachectl trace --timeline FILE.json wrote: {what}"
        raise BadRequest(message) from None


def _read_spans(events: Any) -> Iterator[Span]:  # noqa: ANN401 - JSON
    for event in events:
        if event["ph"] == "X":
            given: Mapping[str, Any] = event["args"]
            if event["cat"] not in STAGES:
                message = f"unknown stage {event['cat']!r}"
                raise ValueError(message)
            yield Span(
                _whole(event["pid"]),
                _whole(event["tid"]),
                event["cat"],
                _text(event["name"]),
                _number(event["ts"]) * _MICROSECOND,
                _duration(event["dur"]) * _MICROSECOND,
                layer=_optional(_text, given.get("layer")),
                kernel=_optional(_text, given.get("kernel")),
                outcome=_optional(_text, given.get("outcome")),
                bytes=_optional(_whole, given.get("bytes")),
            )


def _process(given: Mapping[str, Any]) -> Process:
    command, host = _text(given["command"]), _text(given["host"])
    return Process(_whole(given["process"]), command, host, _optional(_whole, given["rank"]))


def _optional(read: Callable[[object], T], value: object) -> T | None:
    return None if value is None else read(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        message = f"{value!r:.40} is no text"
        raise TypeError(message)
    return value


def _number(value: object) -> float:
    # NaN fails every comparison.
    if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:  # type: ignore[operator]
        message = f"{value!r:.40} is no time"
        raise ValueError(message)
    return float(value)  # type: ignore[arg-type]


def _duration(value: object) -> float:
    return max(0.0, _number(value))


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        message = f"{value!r:.40} is no whole number"
        raise ValueError(message)
    return value
