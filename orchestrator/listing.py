"""The entries of several layers: one that is named by a part of its key, and all that a selection matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layer_set import warn_user
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import AsJson, Entry, Orphan, Problem

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection

#: Characters of a key that are enough to mean one, and keys that an error names.
_SHORTEST: Final = 4
_SOME: Final = 4


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a listing; ``failed`` if entries could not be listed because of it.

    ``path`` is ``None`` if the layer as a whole failed.
    """

    layer: str
    path: Path | None
    code: str
    message: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """The selected entries, and the problems met."""

    entries: tuple[Entry, ...]
    problems: tuple[Trouble, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/ls/1")

    @property
    def failed(self) -> bool:
        """Return whether entries may be missing."""
        return any(trouble.failed for trouble in self.problems)


def full_key(layers: Iterable[Layer], text: str) -> str:
    """Return the only key of some layers that begins with a text, or whose last part does.

    A text that is a key, or that begins none, is returned as it is; so is one of fewer than 4 characters. Raises
    :class:`BadRequest`, with some of the keys, if it begins several.
    """
    keys: set[str] = set()
    for layer in layers if len(text) >= _SHORTEST else ():
        with suppress(*FAILURES):
            if layer.store.is_key(text):
                return text
            for root in layer.roots():
                for thing in layer.store.scan(root, contents=False):
                    if isinstance(thing, (Entry, Orphan)) and thing.key == text:
                        return text
                    if isinstance(thing, Entry) and any(
                        part.startswith(text) for part in (thing.key, thing.key.rpartition("/")[2])
                    ):
                        keys.add(thing.key)
    if len(keys) > 1:
        some = ", ".join(sorted(keys)[:_SOME])
        more = f" and {len(keys) - _SOME} more" if len(keys) > _SOME else ""
        raise BadRequest(f"{len(keys)} keys begin with {text!r}: {some}{more}; write more of it")
    return keys.pop() if keys else text


def _warn_of_failures(trouble: Trouble) -> None:
    if trouble.failed:
        warn_user(f"{trouble.layer}: {trouble.message}")


def listed(
    layers: Iterable[Layer],
    selection: Selection,
    notice: Callable[[Trouble], None] = _warn_of_failures,
    *,
    contents: bool = True,
) -> Iterator[Entry]:
    """Yield the selected entries of every root. A root that fails is given to ``notice``, and the others go on.

    ``notice`` gets what could not be listed, and what looks damaged; by default it warns of the first. Without
    ``contents`` entries are not opened, as in :meth:`Layer.scan`.
    """
    for layer in layers:
        try:
            roots = layer.roots()
        except FAILURES as error:
            notice(Trouble(layer.name, None, "failed", reason_of(error), failed=True))
            continue
        for root in roots:
            try:
                for thing in layer.store.find(root, selection) if contents else layer.store.scan(root, contents=False):
                    if isinstance(thing, Problem):
                        notice(Trouble(layer.name, thing.path, thing.code, thing.message, failed=thing.hides))
                    elif isinstance(thing, Entry) and selection.matches(thing):
                        yield thing
            except FAILURES as error:  # noqa: PERF203 - one must not end the rest
                notice(Trouble(layer.name, root.path, "unreadable", reason_of(error), failed=True))
