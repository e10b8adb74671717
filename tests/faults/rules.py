"""The rules for the output of a command under a fault; ``sweep.py`` lists the rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from injector import Ended

#: Moments: they differ from run to run.
_MOMENTS: Final = frozenset({"generated", "used", "created", "modified", "oldest", "newest", "written_before"})


def timeless(text: str) -> object:
    """Return a document without the moments in it, or other text as it is."""
    try:
        return without_moments(json.loads(text))
    except ValueError:
        return text


def without_moments(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: without_moments(part) for name, part in value.items() if name not in _MOMENTS}
    return [without_moments(part) for part in value] if isinstance(value, list) else value


def miscounted(done: Ended, word: str, more: Mapping[str, set[str]], less: Mapping[str, set[str]]) -> Iterator[str]:
    try:
        said = {layer["layer"]: layer[word] for layer in done.json["layers"]}
    except ValueError:
        return
    for layer in more.keys() | said.keys():
        changed = len(more.get(layer, set()) - less.get(layer, set()))
        if said.get(layer, 0) != changed:
            yield f"{layer}: says {said.get(layer, 0)} {word}, and it is {changed}"


# ---------------------------------------------------------------------- what a verb that reads may say


def _false_report(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    numbers = ("entries", "files", "bytes", "orphan_files", "orphan_bytes", "stale_entries", "stale_bytes")
    places = [("total", said["total"], true["total"], True)]
    for layer, whole in zip(said["layers"], true["layers"], strict=True):
        named = bool(layer["failures"]) or any(root["problems"] for root in layer["roots"])
        places.append((layer["layer"], layer, whole, named))
        places += [
            (root["path"], root, good, bool(root["problems"]))
            for root, good in zip(layer["roots"], whole["roots"], strict=True)
        ]
    for name, part, whole, named in places:
        for number in numbers:
            value = part.get(number)
            if value == whole.get(number) or (value is None and not part["complete"]):
                continue
            if value is None or part["complete"] or not named or value > whole[number]:
                yield f"{name}: {value} {number} instead of {whole[number]}, and nobody says so"


#: What stands for what was not read.
_UNKNOWN: Final[tuple[object, ...]] = (None, {}, [], {"of": "unknown"})


def _false_listing(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    known = {(entry["layer"], entry["root"], entry["key"]): entry for entry in true["entries"]}
    listed = {(entry["layer"], entry["root"], entry["key"]): entry for entry in said["entries"]}
    failed = {problem["layer"] for problem in said["problems"] if problem["failed"]}
    for name, entry in listed.items():
        other = {field for field, value in entry.items() if value != known.get(name, {}).get(field)}
        if lies := [field for field in other - {"stale_because"} if entry[field] not in _UNKNOWN]:
            yield f"{name}: another {lies}"
        elif other and name[0] not in failed:
            yield f"{name}: {other} not read, and nobody says so"
    if required_roots := {name[0] for name in known.keys() - listed.keys()} - failed:
        yield f"lacks entries of {required_roots}, and nobody says so"


def _false_findings(said: Any, true: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    def names(document: Any) -> set[tuple[str, ...]]:  # noqa: ANN401 - JSON
        return {
            (found["layer"], found["root"], str(found["key"]), found["code"])
            for found in document["findings"]
            if found["code"] != "unreadable"
        }

    unread = {found["layer"] for found in said["findings"] if found["code"] == "unreadable"}
    if new := names(said) - names(true):
        yield f"found what is not so: {sorted(new)[:2]}"
    if required_roots := {name[0] for name in names(true) - names(said)} - unread:
        yield f"lacks findings of {required_roots}, and nobody says so"


TRUTHS: Final = {
    "report": _false_report,
    "ls": _false_listing,
    **dict.fromkeys(("verify", "doctor"), _false_findings),
}
