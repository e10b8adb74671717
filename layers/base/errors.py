"""The errors that cachectl raises on purpose. A *miss* is not an error: it is ``None``."""

from __future__ import annotations

from cachectl.layers.base.text import printable

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


class CachectlError(Exception):
    """Anything that cachectl raises on purpose; its text is one line that a user can act on."""


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
    """Something in an entry's place is in a format that this cachectl does not know: it is left unchanged."""


class Busy(LayerError, TimeoutError):
    """A lock could not be taken before the timeout."""


class Damaged(LayerError, ValueError):
    """Content that the library could not use."""


class EntryExists(LayerError, FileExistsError):
    """The key belongs to a different entry, and replacing it was not requested."""

    def __init__(self, layer: str, path: Path | str | None = None) -> None:
        super().__init__(layer, "a different entry has this key; --replace puts this one in its place", path)


class Unreachable(LayerError, OSError):
    """The operating system refused to read or write; the cause is chained."""


class Pending(Unreachable):
    """A write to a database was interrupted. The next program that opens it finishes it; until then it is not read."""


class NoRoom(Unreachable):
    """The file system is full or a quota is exhausted: the operation may succeed once something else is removed."""


class Unsettled(LayerError, OSError):
    """The entry is in its place, but a later step failed, such as updating an index; the message says which."""


#: What one root or layer may raise without stopping the others: third-party layers raise anything.
FAILURES: tuple[type[Exception], ...] = (Exception, SystemExit)  # type: ignore[assignment]
#: What parsing a file may raise, in the parser itself or where a field has an unexpected type, length or size.
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def not_a_key(layer: str, key: str) -> LayerError:
    """Return the error for a text that cannot be one of a layer's keys."""
    return LayerError(layer, f"{key!r} is not a key of this layer; cachectl ls {layer} lists the keys")


def reason_of(error: BaseException) -> str:
    """Return an error's message without the layer's name; the class precedes it if no layer raises it on purpose."""
    if isinstance(error, LayerError):
        return error.message
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return printable(": ".join(filter(None, (type(error).__name__, str(error)))))
