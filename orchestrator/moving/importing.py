"""Import: place the entries of a bundle in the caches of this environment, once it is trusted and complete.

A cache is code that programs run, so the whole file must be trusted first. The file is read once, into a copy that no
other process can reach, and every later step reads that copy. Then every checksum is verified. Only then are entries
placed one by one, as ``put`` does, never over a different one. An interrupted import can be repeated: the entries
already placed are recognised.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final

from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.errors import FAILURES, BadRequest, EntryExists, LayerError, Unsettled, reason_of
from cachectl.layers.base.facts import Ability, Artifact, Entry, Note
from cachectl.layers.base.limits import LARGEST_BUNDLE, SPARED_ROOM
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import moment_text
from cachectl.layers.base.texts import printable
from cachectl.moving.bundle import MAGIC, BadBundle, Item, Manifest, Reader, artifact_of, in_batches
from cachectl.moving.portability import Difference, differences, outlook, portability_key
from cachectl.moving.signing import Untrusted, signer
from cachectl.moving.transfer import opened, signature_of, without_secrets
from cachectl.switching.isolated import isolated_root
from cachectl.switching.run import environment_in

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Trust:
    """The reason to trust a bundle: exactly one of a list of signers, a checksum, or the user's word.

    With ``after``, in epoch seconds, a bundle must have been signed after that moment.
    """

    allowed_signers: str | None = None
    sha256: str | None = None
    blindly: bool = False
    after: float | None = None

    def __post_init__(self) -> None:
        if (self.allowed_signers is not None) + (self.sha256 is not None) + self.blindly != 1:
            raise BadRequest("a bundle is code: give one of --allowed-signers, --sha256 and --trust")
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            message = f"{printable(self.sha256)[:80]!r} is not a SHA-256 of 64 hexadecimal digits"
            raise BadRequest(message)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The number of entries of a layer with the same outlook."""

    outlook: Outlook
    entries: int
    as_json: ClassVar[AsJson] = AsJson(flat=("outlook",))


@dataclass(frozen=True, slots=True)
class ImportedLayer:
    """What an import did with a layer, or (``dry_run``) would do.

    ``there`` counts identical entries that were present already; ``kept`` lists different present ones, which stay;
    ``cannot_hit`` counts entries that cannot be hit here and were not placed. ``exposed``: others could write where the
    bundle was made. ``foreseen`` counts the entries that are here afterwards, and those that cannot be hit, by outlook.
    ``entries`` are those that a dry run would place; ``None`` otherwise.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    cannot_hit: int = 0
    kept: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    foreseen: tuple[Foreseen, ...] = ()
    differences: tuple[Difference, ...] = ()
    exposed: bool = False
    entries: tuple[Entry, ...] | None = None
    as_json: ClassVar[AsJson] = AsJson(
        optional=("entries",), names={"foreseen": "outlook", "exposed": "writable_by_others"}
    )


@dataclass(frozen=True, slots=True)
class ImportTotal:
    """The sums over all layers."""

    placed: int
    bytes: int
    there: int
    cannot_hit: int
    kept: int
    failed: int


@dataclass(frozen=True, slots=True)
class Import:
    """What an import did, and why the file, with this SHA-256, was trusted.

    ``made`` is when the bundle was signed, in epoch seconds; ``None`` for an unsigned one.
    """

    file: str
    sha256: str
    trusted: str
    dry_run: bool
    layers: tuple[ImportedLayer, ...]
    made: int | None = None
    as_json: ClassVar[AsJson] = AsJson("cachectl/import/1", also=("total",))

    @property
    def total(self) -> ImportTotal:
        """Return the sums over all layers."""
        return total(ImportTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether a layer refused an entry, or a layer is missing."""
        return any(layer.failed for layer in self.layers)


@dataclass
class _Counts:
    """The results for the entries of one layer so far."""

    placed: int = 0
    bytes: int = 0
    there: int = 0
    cannot_hit: int = 0
    kept: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    foreseen: Counter[Outlook] = field(default_factory=Counter)


def import_bundle(
    stack: LayerSet, file: str, trust: Trust, *, dry_run: bool = False, most: int = LARGEST_BUNDLE
) -> Import:
    """Place the entries of a bundle that can be hit here, and return what was done with every entry.

    A bundle of more than ``most`` bytes is refused. Raises :class:`Untrusted` if nothing shows that it can be trusted,
    and :class:`BadBundle` if it is damaged, incomplete or holds anything but listed entries; in both cases nothing was
    written. The result names entries that a layer refuses.
    """
    with private_copy(stack, file, most) as copy:
        return import_copy(stack, copy, file, trust, dry_run=dry_run)


def import_copy(stack: LayerSet, copy: BinaryIO, file: str, trust: Trust, *, dry_run: bool = False) -> Import:
    """Place the entries of an open bundle that no other process can change, as :func:`import_bundle` does."""
    checked = trusted_bundle(copy, file, trust)
    done = Placing(stack, checked.manifest, dry_run=dry_run)
    copy.seek(0)
    contents = Reader(copy, checked.bytes, known=checked.manifest).contents()
    for batch in in_batches(contents, lambda pair: pair[0].layer, lambda pair: pair[0].bytes):
        done.take(batch)
    return Import(
        without_secrets(file), checked.sha256, checked.trusted, dry_run, done.results(), checked.manifest.made
    )


@dataclass(frozen=True, slots=True)
class TrustedBundle:
    """A trusted, complete bundle: its size in bytes, its SHA-256, why it is trusted, and its manifest."""

    bytes: int
    sha256: str
    trusted: str
    manifest: Manifest


def trusted_bundle(copy: BinaryIO, file: str, trust: Trust) -> TrustedBundle:
    """Check that an open bundle is trusted, and verify every checksum in it.

    Raises :class:`Untrusted` or :class:`BadBundle`.
    """
    size, digest = _measured(copy)
    trusted = _trusted(copy, file, digest, trust)
    manifest = _checked(copy, size)
    _demand_new(manifest.made, file, trust.after)
    return TrustedBundle(size, digest, trusted, manifest)


def _demand_new(made: int | None, file: str, after: float | None) -> None:
    """Raise :class:`Untrusted` if a bundle must be newer, or has no time of signing."""
    if after is None or (made is not None and made > after):
        return
    what = "has no time of signing" if made is None else f"was made {moment_text(made)}"
    message = f"{printable(without_secrets(file))}: {what}; only one made after {moment_text(after)} is accepted"
    raise Untrusted(message)


@contextmanager
def private_copy(stack: LayerSet, file: str, most: int = LARGEST_BUNDLE) -> Iterator[BinaryIO]:
    """Copy a file or a URL, read once, into an unnamed file: nobody can change a byte between check and use.

    Raises :class:`BadBundle` for more than ``most`` bytes, and if the copy would fill its file system.
    """
    from cachectl.moving.exporting import unseen

    with opened(file) as source, unseen(stack.environment) as copy:
        chunk = source.read(_CHUNK)
        if not chunk.startswith(MAGIC):
            # Refuse before copying a device that never ends.
            raise BadBundle(f"{without_secrets(file)} is not compressed by zstd")
        size = 0
        while chunk:
            size += len(chunk)
            if size > most:
                raise BadBundle(
                    f"{without_secrets(file)} has more than {most:,} bytes; import --max-size SIZE accepts more"
                )
            _demand_room(copy, stack, size)
            copy.write(chunk)
            chunk = source.read(_CHUNK)
        copy.flush()
        yield copy


def _demand_room(copy: BinaryIO, stack: LayerSet, size: int) -> None:
    """Raise :class:`BadBundle` if a copy would fill a file system that other programs use too."""
    if lacks_room(copy):
        folder = stack.environment.temporary
        raise BadBundle(f"{folder} has no room for it after {size:,} bytes; set TMPDIR to a folder with more")


def lacks_room(copy: BinaryIO) -> bool:
    """Return whether more bytes in an open file would fill a file system that other programs use too."""
    if not hasattr(os, "fstatvfs"):
        return False
    disk = os.fstatvfs(copy.fileno())
    return disk.f_bavail * disk.f_frsize < min(SPARED_ROOM, disk.f_blocks * disk.f_frsize // 20) + _CHUNK


def _compared(
    layer: Layer, artifact: Artifact, there: Artifact | LayerError | OSError | None
) -> bool | LayerError | OSError:
    """Return ``True`` for an entry that is missing, ``False`` for an equal one, else an error."""
    if isinstance(there, Artifact):
        return False if there.data == artifact.data else EntryExists(layer.name)
    return True if there is None else there


def _measured(copy: BinaryIO) -> tuple[int, str]:
    copy.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: copy.read(_CHUNK), b""):
        digest.update(chunk)
    return copy.tell(), digest.hexdigest()


def _trusted(copy: BinaryIO, file: str, digest: str, trust: Trust) -> str:
    """Return why the copy is trusted. Raises :class:`Untrusted`."""
    if trust.allowed_signers is not None:
        with signature_of(file) as signature:
            return f"signed by {signer(copy, signature, trust.allowed_signers)}"
    if trust.sha256 is not None:
        if not hmac.compare_digest(digest, trust.sha256.lower()):
            message = f"{printable(without_secrets(file))}: its SHA-256 is {digest}, not the given one"
            raise Untrusted(message)
        return "its SHA-256 is the given one"
    return "you said so"


def _checked(copy: BinaryIO, size: int) -> Manifest:
    """Read and verify everything before anything is placed."""
    copy.seek(0)
    reader = Reader(copy, size)
    reader.check()
    return reader.manifest


class Placing:
    """Places entries, layer by layer."""

    def __init__(self, stack: LayerSet, manifest: Manifest, *, dry_run: bool) -> None:
        self._stack = stack
        self._manifest = manifest
        self._dry_run = dry_run
        self._outlooks: dict[tuple[object, ...], Outlook] = {}
        self._counts = {name: _Counts() for name in manifest.portability_keys}
        self._differing = {
            name: differences(
                stack.portability(name), there, portability_key(stack.portability(name), stack.environment)
            )
            for name, there in manifest.portability_keys.items()
        }

    def take(self, batch: list[tuple[Item, bytes]]) -> None:
        """Place, or for a dry run check, entries of one layer."""
        name = batch[0][0].layer
        counts = self._counts[name]
        wanted: list[tuple[Item, Artifact]] = []
        for item, data in batch:
            seen = self._outlook(item)
            if name not in self._stack:
                counts.failed.append(Note(item.key, "no layer of this name exists here"))
            elif seen.hits is False:
                counts.cannot_hit += 1
                counts.foreseen[seen] += 1
            else:
                wanted.append((item, artifact_of(item, data)))
        if wanted:
            done = self._done(self._stack[name], [artifact for _, artifact in wanted])
            for (item, _), one in zip(wanted, done, strict=True):
                self._count(counts, item, one)
            if self._dry_run:
                new = [pair for pair, one in zip(wanted, done, strict=True) if one is True]
                counts.entries += _described(self._stack, self._stack[name], new)

    def _outlook(self, item: Item) -> Outlook:
        """Return the outlook of an entry, cached by device and versions: looking up what is installed takes long."""
        known = (item.layer, item.device, *sorted(item.versions.items()))
        if known not in self._outlooks:
            there, portability = self._manifest.portability_keys[item.layer], self._stack.portability(item.layer)
            differing = self._differing[item.layer]
            self._outlooks[known] = outlook(portability, item, there, self._stack.environment, differing)
        return self._outlooks[known]

    def _done(self, layer: Layer, wanted: list[Artifact]) -> list[bool | LayerError | OSError]:
        try:
            if not self._dry_run:
                return layer.put_new(wanted)
            there = layer.get_many([artifact.key for artifact in wanted])
            return [_compared(layer, artifact, there.get(artifact.key)) for artifact in wanted]
        except FAILURES as error:
            # The error is about the layer as a whole.
            return [error for _ in wanted]

    def _count(self, counts: _Counts, item: Item, done: bool | LayerError | OSError) -> None:
        """Count the result for one entry; the outlook counts only for an entry that is here now."""
        if isinstance(done, EntryExists):
            counts.kept.append(Note(item.key, "a different or damaged entry is here, and stays"))
            return
        if isinstance(done, (LayerError, OSError)):
            counts.failed.append(Note(item.key, reason_of(done)))
            if not isinstance(done, Unsettled):
                return
        counts.foreseen[self._outlook(item)] += 1
        if not done:
            counts.there += 1
            return
        counts.placed += 1
        counts.bytes += item.bytes

    def results(self) -> tuple[ImportedLayer, ...]:
        """Return the results, layer by layer."""
        return tuple(
            ImportedLayer(
                layer=name,
                placed=counts.placed,
                bytes=counts.bytes,
                there=counts.there,
                cannot_hit=counts.cannot_hit,
                kept=tuple(counts.kept),
                failed=tuple(counts.failed),
                entries=tuple(counts.entries) if self._dry_run else None,
                foreseen=tuple(Foreseen(seen, entries) for seen, entries in counts.foreseen.items()),
                differences=self._differing[name],
                exposed=name in self._manifest.exposed,
            )
            for name, counts in self._counts.items()
        )


def _described(stack: LayerSet, layer: Layer, new: Sequence[tuple[Item, Artifact]]) -> list[Entry]:
    """Describe entries of one layer that would be placed, as the layer describes them once they are.

    Kernel names can be read only from entries on a disk, so the entries are placed in an isolated root. An entry that
    the layer does not find there is described by the bundle, without kernels.
    """
    place = layer.roots()[0].path
    found: dict[str, Entry] = {}
    if new and layer.abilities()[Ability.RELOCATE] is None:
        with isolated_root(stack.environment) as folder, suppress(*FAILURES):
            isolated = type(stack)(environment_in(stack.environment, (layer,), folder))[layer.name]
            isolated.put_new([artifact for _, artifact in new])
            found = {entry.key: entry for entry in isolated.entries()}
    return [
        replace(found[item.key], root=place, created=None, modified=None, used=None, written_before=None)
        if item.key in found
        else Entry(layer.name, item.key, place, item.bytes, 0, device=item.device, versions=item.versions)
        for item, _ in new
    ]
