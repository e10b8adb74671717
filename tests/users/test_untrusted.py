"""What the superuser believes of a document that another user's process wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from cachectl.homes.gathering import VERBS
from cachectl.homes.untrusted import BadAnswer, document_of

if TYPE_CHECKING:
    from homes import Home

COMMANDS = {
    "report": ("report", "--neighbours"),
    "ls": ("ls",),
    "verify": ("verify",),
    "doctor": ("doctor",),
    "purge": ("purge", "--all", "--dry-run"),
    "prune": ("prune", "--stale"),
}


def kind(verb: str) -> type:
    module, _, name = VERBS[verb].partition(":")
    found: type = getattr(import_module(module), name)
    return found


@pytest.mark.real
def test_the_document_of_each_verb_is_taken_as_it_is(warm: Home) -> None:
    (warm.path / ".cache" / "pocl" / "kcache" / "AB" / "thesis").mkdir(parents=True)
    for verb, command in COMMANDS.items():
        document = warm.json(*command, check=False)
        assert document_of(kind(verb), json.dumps(document).encode()) == document


ENTRY: dict[str, Any] = {
    **dict.fromkeys(("stale", "stale_because", "created", "written_before", "device")),
    **dict.fromkeys(("bytes", "files", "used"), 1),
    **{key: {"pocl": "7"} for key in ("versions", "detail")},
    **dict(zip(("layer", "key", "root", "modified", "kernels"), ("pocl", "AB/C", "/root", 1.5, ["axpy"]), strict=True)),
}


def listing(**changes: Any) -> bytes:  # noqa: ANN401 - JSON
    document = {"schema": "cachectl/ls/1", "entries": [{**ENTRY, **changes}], "problems": []}
    return json.dumps(document).encode()


def read(data: bytes) -> dict[str, Any]:
    return document_of(kind("ls"), data)


def test_control_characters_are_escaped_and_unknown_keys_left_out() -> None:
    (entry,) = read(listing(key="\x1b]0;\x07\n\u202e", versions={"a\n": "\r"}, guest=[[]], stamp=5))["entries"]
    assert entry == {**ENTRY, "key": r"\x1b]0;\x07\n\u202e", "versions": {r"a\n": r"\r"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": "1"},
        {"bytes": -1},
        {"bytes": 1.5},
        {"bytes": True},
        {"bytes": 1 << 64},
        {"modified": float("inf")},
        {"modified": float("nan")},
        {"kernels": "axpy"},
        {"kernels": [None]},
        {"versions": {"pocl": {}}},
        {"key": "x" * (1 << 16)},
        {"key": None},
        {"stale": 1},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        read(listing(**changes))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no JSON": lambda: b"\x00" * 100,
    "deep": lambda: b"[" * 1_000_000,
    "deep below a key": lambda: b'{"schema": "cachectl/ls/1", "entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many values": lambda: b"[" + b"[]," * 5_000_000 + b"[]]",
    "a huge number": lambda: b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "a huge float": lambda: listing(modified=0.0).replace(b"0.0", b"1e999"),
    "another schema": lambda: listing().replace(b"ls/1", b"ls/2"),
    "a list": lambda: b"[]",
    "a missing key": lambda: listing().replace(b'"files"', b'"filed"'),
    "another encoding": lambda: "\udcff".encode("utf-16", "surrogatepass"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_document_is_refused(case: str) -> None:
    with pytest.raises(BadAnswer, match=r"^its answer [ -~]{1,100}$"):
        read(HOSTILE[case]())
