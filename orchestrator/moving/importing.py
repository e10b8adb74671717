"""Import: what a bundle holds, placed in the caches of this environment once it is trusted and known to be whole.

A cache is code that programs run. So first somebody must vouch for every byte; the bytes are read once, into a copy
that no other process can reach, and all that follows reads that copy. Then every sum is checked. Only then is anything
placed, entry by entry, as ``put`` does: never over a different one. Who is interrupted begins again, and finds
what was placed already there.
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
from cachectl.layers.base.errors import FAILURES, BadRequest, EntryExists, LayerError, Unsettled, printable, reason_of
from cachectl.layers.base.facts import Ability, Artifact, Entry, Note
from cachectl.layers.base.limits import LARGEST_BUNDLE, SPARED_ROOM
from cachectl.layers.base.parts import Outlook
from cachectl.layers.base.selection import moment_text
from cachectl.moving.bundle import MAGIC, BadBundle, Item, Manifest, Reader, artifact_of, in_batches
from cachectl.moving.portability import Difference, differences, outlook, portability_key
from cachectl.moving.signing import Untrusted, signer
from cachectl.moving.transfer import opened, signature_of, without_secrets
from cachectl.switching.isolated import isolated_root
from cachectl.switching.run import variables_isolated

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Trust:
    """Why the bytes of a bundle are believed: exactly one of a list of signers, a sum, or the user's word.

    With ``after``, in epoch seconds, only a bundle that was signed after that moment is.
    """

    allowed_signers: str | None = None
    sha256: str | None = None
    blindly: bool = False
    after: float | None = None

    def __post_init__(self) -> None:
        if (self.allowed_signers is not None) + (self.sha256 is not None) + self.blindly != 1:
            raise BadRequest("a bundle is code: say one of --allowed-signers, --sha256 and --trust")
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            message = f"{printable(self.sha256)[:80]!r} is no SHA-256: 64 hexadecimal digits"
            raise BadRequest(message)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """How many entries of a layer have the same outlook."""

    outlook: Outlook
    entries: int
    as_json: ClassVar = AsJson(flat=("outlook",))


@dataclass(frozen=True, slots=True)
class ImportedLayer:
    """What an import did with a layer, or (``dry_run``) would do.

    ``there`` counts entries that are here already, bit by bit; ``kept`` are different ones that were here and stay;
    ``cannot_hit`` counts entries that cannot be hit here, and so were not placed. ``exposed``: others could write where
    the bundle was made. ``foreseen`` counts what is here afterwards, and what cannot be hit, by its outlook.
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
    as_json: ClassVar = AsJson(optional=("entries",), names={"foreseen": "outlook", "exposed": "writable_by_others"})


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
    """What an import did, and why the file, of this SHA-256, was believed.

    ``made`` is when the bundle was signed, in epoch seconds, ``None`` where it does not say.
    """

    file: str
    sha256: str
    trusted: str
    dry_run: bool
    layers: tuple[ImportedLayer, ...]
    made: int | None = None
    as_json: ClassVar = AsJson("cachectl/import/1", also=("total",))

    @property
    def total(self) -> ImportTotal:
        """Return the sums over all layers."""
        return total(ImportTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether a layer refused an entry, or there is no such layer."""
        return any(layer.failed for layer in self.layers)


@dataclass
class _Counts:
    """What has happened to the entries of one layer so far."""

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
    """Place what a bundle holds and what can be hit here, and say what was done with every entry.

    A bundle of more than ``most`` bytes is refused. Raises :class:`Untrusted` where nobody vouches for it,
    :class:`BadBundle` where it is not whole or would do more than announce entries, and then nothing was written. What
    a layer refuses is named in what is returned.
    """
    with private_copy(stack, file, most) as copy:
        return import_copy(stack, copy, file, trust, dry_run=dry_run)


def import_copy(stack: LayerSet, copy: BinaryIO, file: str, trust: Trust, *, dry_run: bool = False) -> Import:
    """Place what an open bundle holds that no other process can change, as :func:`import_bundle` does."""
    checked = trusted_bundle(copy, file, trust)
    done = _Placing(stack, checked.manifest, dry_run=dry_run)
    copy.seek(0)
    contents = Reader(copy, checked.bytes, known=checked.manifest).contents()
    for batch in in_batches(contents, lambda pair: pair[0].layer, lambda pair: pair[0].bytes):
        done.take(batch)
    return Import(
        without_secrets(file), checked.sha256, checked.trusted, dry_run, done.results(), checked.manifest.made
    )


@dataclass(frozen=True, slots=True)
class TrustedBundle:
    """A bundle that is believed, and whole: its size in bytes, its SHA-256, why, and what is in it."""

    bytes: int
    sha256: str
    trusted: str
    manifest: Manifest


def trusted_bundle(copy: BinaryIO, file: str, trust: Trust) -> TrustedBundle:
    """See that an open bundle is to be believed, and that every sum in it holds.

    Raises :class:`Untrusted` or :class:`BadBundle`.
    """
    size, digest = _measured(copy)
    trusted = _trusted(copy, file, digest, trust)
    manifest = _checked(copy, size)
    _demand_new(manifest.made, file, trust.after)
    return TrustedBundle(size, digest, trusted, manifest)


def _demand_new(made: int | None, file: str, after: float | None) -> None:
    """Raise :class:`Untrusted` where a bundle must be newer, or does not say how old it is."""
    if after is None or (made is not None and made > after):
        return
    what = "does not say when it was made, as signed bundles do" if made is None else f"was made {moment_text(made)}"
    message = f"{printable(without_secrets(file))}: {what}; only one made after {moment_text(after)} is taken"
    raise Untrusted(message)


@contextmanager
def private_copy(stack: LayerSet, file: str, most: int = LARGEST_BUNDLE) -> Iterator[BinaryIO]:
    """Read a file or a URL once, into a file without a name: nobody can swap a byte between the check and the use.

    Raises :class:`BadBundle` for more than ``most`` bytes, and where the copy would fill its file system.
    """
    from cachectl.moving.exporting import unseen

    with opened(file) as source, unseen(stack.environment) as copy:
        chunk = source.read(_CHUNK)
        if not chunk.startswith(MAGIC):
            # Before a device without end is copied.
            raise BadBundle(f"{without_secrets(file)} is not compressed by zstd")
        size = 0
        while chunk:
            size += len(chunk)
            if size > most:
                raise BadBundle(
                    f"{without_secrets(file)} has more than {most:,} bytes; import --max-size SIZE takes more"
                )
            _demand_room(copy, stack, size)
            copy.write(chunk)
            chunk = source.read(_CHUNK)
        copy.flush()
        yield copy


def _demand_room(copy: BinaryIO, stack: LayerSet, size: int) -> None:
    """Refuse to fill the file system of a copy, which other programs use too."""
    if not hasattr(os, "fstatvfs"):
        return
    disk = os.fstatvfs(copy.fileno())
    if disk.f_bavail * disk.f_frsize < min(SPARED_ROOM, disk.f_blocks * disk.f_frsize // 20) + _CHUNK:
        folder = stack.environment.temporary
        raise BadBundle(f"{folder} has no room for it after {size:,} bytes; TMPDIR names a folder with more")


def _measured(copy: BinaryIO) -> tuple[int, str]:
    copy.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: copy.read(_CHUNK), b""):
        digest.update(chunk)
    return copy.tell(), digest.hexdigest()


def _trusted(copy: BinaryIO, file: str, digest: str, trust: Trust) -> str:
    """Say who vouches for the copy. Raises :class:`Untrusted`."""
    if trust.allowed_signers is not None:
        with signature_of(file) as signature:
            return f"signed by {signer(copy, signature, trust.allowed_signers)}"
    if trust.sha256 is not None:
        if not hmac.compare_digest(digest, trust.sha256.lower()):
            message = f"{printable(without_secrets(file))}: its SHA-256 is {digest}, not the one that was given"
            raise Untrusted(message)
        return "its SHA-256 is the one that was given"
    return "you said so"


def _checked(copy: BinaryIO, size: int) -> Manifest:
    """Read everything once, so that every sum is known to hold before anything is placed."""
    copy.seek(0)
    reader = Reader(copy, size)
    reader.check()
    return reader.manifest


class _Placing:
    """One layer after the other, entry by entry."""

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
        """Do with entries of one layer what there is to do."""
        name = batch[0][0].layer
        counts = self._counts[name]
        wanted: list[tuple[Item, Artifact]] = []
        for item, data in batch:
            seen = self._outlook(item)
            if name not in self._stack:
                counts.failed.append(Note(item.key, "no layer of this name is here"))
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
        """Judge an entry as the last one of the same versions: most are, and asking what is installed takes long."""
        known = (item.layer, item.device, *sorted(item.versions.items()))
        if known not in self._outlooks:
            there, portability = self._manifest.portability_keys[item.layer], self._stack.portability(item.layer)
            differing = self._differing[item.layer]
            self._outlooks[known] = outlook(portability, item, there, self._stack.environment, differing)
        return self._outlooks[known]

    def _done(self, layer: Layer, wanted: list[Artifact]) -> list[bool | LayerError | OSError]:
        try:
            return layer.put_new(wanted, dry_run=self._dry_run)
        except FAILURES as error:
            # The layer as a whole.
            return [error for _ in wanted]

    def _count(self, counts: _Counts, item: Item, done: bool | LayerError | OSError) -> None:
        """Count what was done with an entry; only of one that is here now is its outlook anybody's concern."""
        if isinstance(done, EntryExists):
            counts.kept.append(Note(item.key, "a different entry, or a damaged one, is here, and stays"))
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
        """Return what was done, layer by layer."""
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

    Only an entry on a disk names its kernels: these are placed in an isolated root. An entry that the layer does not
    find there is described by the bundle, without kernels.
    """
    place = layer.roots()[0].path
    found: dict[str, Entry] = {}
    if new and layer.abilities()[Ability.RELOCATE] is None:
        with isolated_root(stack.environment) as folder, suppress(*FAILURES):
            changes = variables_isolated((layer,), folder)
            unset = frozenset(name for name, value in changes.items() if value is None)
            kept = {name: value for name, value in changes.items() if value is not None}
            isolated = type(stack)(stack.environment.with_variables(kept, unset))[layer.name]
            isolated.put_new([artifact for _, artifact in new])
            found = {entry.key: entry for entry in isolated.entries()}
    return [
        replace(found[item.key], root=place, created=None, modified=None, used=None, written_before=None)
        if item.key in found
        else Entry(layer.name, item.key, place, item.bytes, 0, device=item.device, versions=item.versions)
        for item, _ in new
    ]
