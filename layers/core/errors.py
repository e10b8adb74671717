"""The errors that cachectl raises on purpose, the texts they are made of, and the limits on sizes.

A *miss* is not an error: it is ``None``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachectl.layers.core.lazy import regex

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: One entry, or one file that is read whole. Entries are held in memory. The largest known ones, programs of the CUDA
#: driver, have some 100 MiB; the whole CUDA cache has 4 GiB by default.
LARGEST_ENTRY = 1 << 30
#: The file of one entry that ``get`` writes and ``put`` reads.
LARGEST_ARTIFACT = LARGEST_ENTRY + (1 << 20)
#: A text database of MIOpen. Its largest shipped ones have some 50 MiB. Changing one holds it several times in memory.
LARGEST_RECORDS = 256 << 20
#: An index that lists the entries of a store. One of 64 MiB lists a million entries of Mesa's.
LARGEST_INDEX = 64 << 20
#: One key. The longest are those of MIOpen, which contain compiler arguments.
LONGEST_KEY = 1 << 14

#: Control characters, also those of Unicode that end a line or turn the direction of text.
_CONTROL = regex("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

#: How many details and versions an entry may have.
MOST_DETAILS = 64
#: A bundle that is copied into the folder of temporary files.
LARGEST_BUNDLE = 32 << 30
#: What such a copy leaves free on that file system, as other programs write there too.
SPARED_ROOM = 256 << 20
#: A signature of OpenSSH has less than 1 KiB.
LARGEST_SIGNATURE = 1 << 20


class CachectlError(Exception):
    """Anything cachectl raises on purpose; its text is one line that a user can act on."""


class BadRequest(CachectlError, ValueError):
    """A layer, key, size, age or option that does not exist or cannot be read."""


class LayerError(CachectlError):
    """A failure of one layer, at a path if one is known."""

    def __init__(self, layer: str, message: str, path: Path | str | None = None) -> None:
        self.layer = layer
        self.message = message
        self.path = path
        # A name on disk may contain newlines or undecodable bytes; the message must stay one line.
        where = "" if path is None else f" ({printable(path)})"
        super().__init__(f"{layer}: {message}{where}")


class Refused(LayerError, PermissionError):
    """The layer cannot, or must not, do this here; the message says why."""


class UnknownFormat(Refused):
    """Something in the place of an entry is in a format that this cachectl does not know: it is left as it is."""


class Busy(LayerError, TimeoutError):
    """A lock could not be taken before the timeout."""


class Damaged(LayerError, ValueError):
    """Content that its library could not use."""


class EntryExists(LayerError, FileExistsError):
    """The key belongs to a different entry, and replacing it was not requested."""

    def __init__(self, layer: str, path: Path | str | None = None) -> None:
        super().__init__(layer, "a different entry has this key; --replace puts this one in its place", path)


class Unreachable(LayerError, OSError):
    """The operating system refused to read or write; the cause is chained."""


class NoRoom(Unreachable):
    """The file system is full, or a quota is used up: the same may succeed after something else has been removed."""


class Unsettled(LayerError, OSError):
    """The entry is in its place, but a later step failed, such as counting it in an index; the message says which."""


#: What one root or layer may raise without stopping the others: layers of other people raise anything.
FAILURES: tuple[type[Exception], ...] = (Exception, SystemExit)  # type: ignore[assignment]
#: What parsing the content of a file may raise, in the parser or where a field has another type, length or size.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` with the known word that is most like a wrong one; empty if none is."""
    import difflib

    # Options have their dashes in common.
    names = {one.lstrip("-").lower(): one for one in known}
    likely = difflib.get_close_matches(word.lstrip("-").lower(), names, n=1)
    return "".join(f"; did you mean {names[name]}?" for name in likely)


def not_a_key(layer: str, key: str) -> LayerError:
    """Return the error for a text that does not have the form of a layer's keys."""
    return LayerError(layer, f"{key!r} is not a key of this layer; cachectl ls {layer} lists keys")


def reason_of(error: BaseException) -> str:
    """Return the message without the layer's name; an error that no layer raises on purpose has its kind before it."""
    if isinstance(error, LayerError):
        return error.message
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return printable(": ".join(filter(None, (type(error).__name__, str(error)))))


def printable(path: Path | str) -> str:
    """Return a path as one line: control and undecodable characters are escaped."""
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
    """Return the message for something larger than its limit."""
    return f"has {size:,} bytes; the limit is {most:,}"


def key_complaint(key: str) -> str | None:
    """Return why a text cannot be a key of any layer, else ``None``. Keys come from bundles and become file names."""
    if not key:
        return "is empty"
    if len(key) > LONGEST_KEY:
        return f"is longer than {LONGEST_KEY:,} characters"
    if _CONTROL.search(key):
        return "holds control characters"
    return None
