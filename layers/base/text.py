"""Parts of messages."""

from __future__ import annotations

from cachectl.layers.base.lazy import regex
from cachectl.layers.base.limits import LONGEST_KEY

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import NamedTuple

#: Control characters, and those of Unicode that end a line or change the direction of text.
_CONTROL = regex("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the known word most similar to a wrong one; empty if none is similar."""
    import difflib

    # Leading dashes would make all options similar.
    names = {name.lstrip("-").lower(): name for name in known}
    likely = difflib.get_close_matches(word.lstrip("-").lower(), names, n=1)
    return "".join(f"; did you mean {names[name]}?" for name in likely)


def printable(path: Path | str) -> str:
    """Return a path as one line, with control and undecodable characters escaped."""
    text = str(path)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def too_large(size: int, most: int) -> str:
    """Return the message about something larger than its limit."""
    return f"has {size:,} bytes; the limit is {most:,}"


def key_complaint(key: str) -> str | None:
    """Return why a text cannot be any layer's key, else ``None``. Keys come from bundles and become file names."""
    if not key:
        return "is empty"
    if len(key) > LONGEST_KEY:
        return f"is longer than {LONGEST_KEY:,} characters"
    if _CONTROL.search(key):
        return "contains control characters"
    return None


def short_repr(fact: NamedTuple, *hidden: str) -> str:
    """Return the ``repr`` of a fact without the fields that are ``hidden`` or empty."""
    values = zip(fact._fields, fact, strict=True)
    shown = (f"{name}={value!r}" for name, value in values if name not in hidden and value not in (None, (), {}))
    return f"{type(fact).__name__}({', '.join(shown)})"
