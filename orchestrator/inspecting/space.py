"""Free space on the file systems of the layers' roots, and what each layer holds there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import FAILURES, LayerError
from cachectl.layers.base.facts import Ability, Finding, Root, Scope, Severity, Usage
from cachectl.layers.disk.presence import nearest
from cachectl.layers.disk.room import room_at

if TYPE_CHECKING:
    from cachectl.layers.base.layer import Layer

    #: Counts a root of a layer.
    UsageOf = Callable[[Layer, Root], Usage]

WORST_FIRST: Final = (
    Severity.UNSAFE,
    Severity.FAILS,
    Severity.RISKS,
    Severity.RECOMPILES,
    Severity.HEALS,
    Severity.WASTES,
    Severity.HARMLESS,
)
#: Free bytes and files: below the first nothing can be stored, below the second the next program may run out of space.
_FULL: Final = (1 << 20, 10)
_NEARLY_FULL: Final = (16 << 20, 100)


@dataclass(frozen=True, slots=True)
class Share:
    """What a layer holds on a file system, orphans included; lower bounds if something could not be counted.

    ``bytes`` are those of disk blocks if these are known.
    ``root`` is its first root there. ``clearable`` is set if ``purge --all`` would clear it.
    """

    layer: str
    root: Path
    bytes: int
    files: int
    clearable: bool


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes and files that can still be stored on the file system mounted at ``path``; ``None`` is unknown.

    ``source`` says what sets the limit: the file system, or a quota. ``layers`` are those with a root there, the one
    with the most bytes first.
    """

    path: Path
    source: str
    free_bytes: int | None
    free_files: int | None
    layers: tuple[Share, ...]
    as_json: ClassVar[AsJson] = AsJson(also=("fix",))

    @property
    def lacks_files(self) -> bool:
        """Return whether files are shorter than bytes."""
        return _shortage(self.free_files, 1) > _shortage(self.free_bytes, 0)

    @property
    def largest(self) -> Share | None:
        """Return the layer whose purge frees most of what is short; ``None`` if none frees anything."""
        sizes = {share: share.files if self.lacks_files else share.bytes for share in self.layers if share.clearable}
        largest = max(sizes, key=sizes.__getitem__, default=None)
        return largest if largest is not None and sizes[largest] else None

    @property
    def fix(self) -> str | None:
        """Return the command that frees most; ``None`` if no layer holds anything that can be cleared."""
        return None if self.largest is None else f"cachectl purge {self.largest.layer}"


def _shortage(free: int | None, unit: int) -> int:
    """Return 2 for a full file system, 1 for one that is nearly full, else 0."""
    return sum(free is not None and free < limits[unit] for limits in (_FULL, _NEARLY_FULL))


def cached_usage() -> UsageOf:
    """Return a function that counts a root of a layer once, and then gives the same answer or error."""
    known: dict[tuple[str, Root], Usage | LayerError | OSError] = {}

    def usage_of(layer: Layer, root: Root) -> Usage:
        if (layer.name, root) not in known:
            try:
                known[layer.name, root] = layer.usage(root)
            except FAILURES as error:
                known[layer.name, root] = error
        found = known[layer.name, root]
        if isinstance(found, Usage):
            return found
        raise found

    return usage_of


def spaces(layers: Iterable[Layer], usage_of: UsageOf) -> tuple[Space, ...]:
    """Return the space on every file system that holds a user's root, or will, and in every quota there."""
    places: dict[int, list[tuple[Layer, Root]]] = {}
    for layer in layers:
        with suppress(*FAILURES):
            for number, root in enumerate(layer.roots()):
                # A fallback that holds nothing, the temporary folder for instance, is not in use.
                if root.scope is Scope.USER and (not number or _holds_anything(layer, root, usage_of)):
                    with suppress(OSError):
                        places.setdefault(nearest(root.path).stat().st_dev, []).append((layer, root))
    return tuple(space for held in places.values() for space in _spaces_at(held, usage_of))


def shortage(space: Space) -> Iterator[Finding]:
    """Yield the finding for a file system or quota that is full or nearly full, if it is."""
    free = ((space.free_bytes, "bytes"), (space.free_files, "files"))
    grades = [_shortage(amount, unit) for unit, (amount, _) in enumerate(free)]
    short = [f"{amount:,} more {word}" for grade, (amount, word) in zip(grades, free, strict=True) if grade]
    if not short:
        return
    severity = Severity.FAILS if max(grades) > 1 else Severity.RISKS
    message, largest = f"{space.source} has room for {' and '.join(short)}", space.largest
    if largest is None:
        message += "; no layer holds anything there that can be cleared"
    else:
        held = f"{largest.files:,} files" if space.lacks_files else f"{largest.bytes:,} bytes"
        message += f"; {largest.layer} holds most of what can be cleared there, {held}"
    place = largest or space.layers[0]
    fix = space.fix or "remove other files there"
    yield Finding(place.layer, place.root, None, severity, "full", message, fix)


def may_exist(root: Root) -> bool:
    """Return whether a root exists, or cannot be asked: the read that follows reports the error."""
    try:
        return root.exists
    except OSError:
        return True


def _holds_anything(layer: Layer, root: Root, usage_of: UsageOf) -> bool:
    if not may_exist(root):
        return False
    usage = usage_of(layer, root)
    return bool(usage.files or usage.orphan_files)


def _spaces_at(held: Iterable[tuple[Layer, Root]], usage_of: UsageOf) -> Iterator[Space]:
    shares: dict[str, Share] = {}
    for layer, root in held:
        shares[layer.name] = _with(shares.get(layer.name), layer, root, usage_of)
    layers = tuple(sorted(shares.values(), key=lambda share: -share.bytes))
    with suppress(OSError):
        for room in room_at(layers[0].root):
            yield Space(_mount_point(layers[0].root), room.source, room.bytes, room.files, layers)


def _with(share: Share | None, layer: Layer, root: Root, usage_of: UsageOf) -> Share:
    """Add what one more root holds to the share of a layer."""
    clearable = not layer.precious and layer.abilities()[Ability.CLEAR] is None
    first, size, files = (root.path, 0, 0) if share is None else (share.root, share.bytes, share.files)
    with suppress(*FAILURES):
        usage = usage_of(layer, root)
        apparent = (usage.bytes or 0) + (usage.orphan_bytes or 0)
        size += apparent if usage.disk_bytes is None else usage.disk_bytes
        files += (usage.files or 0) + (usage.orphan_files or 0)
    return Share(layer.name, first, size, files, clearable)


def _mount_point(path: Path) -> Path:
    folder = Path(os.path.realpath(nearest(path)))
    device = folder.stat().st_dev
    while folder != folder.parent and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return folder
