"""Import: what a bundle holds, placed in the caches of this environment once it is trusted and known to be whole.

A cache is code that programs run. So first somebody must vouch for every byte; the bytes are read once, into a copy
that no other process can reach, and all that follows reads that copy. Then every sum is checked. Only then is anything
placed, entry by entry, as ``put`` does: never over a different one. Who is interrupted begins again, and finds
what was placed already there.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Final

from cachectl.bundle import MAGIC, BadBundle, Item, Manifest, Reader, artifact_of
from cachectl.contained import FAILURES
from cachectl.fingerprint import Difference, Outlook, differences, fingerprint, outlook
from cachectl.layers.errors import BadRequest, EntryExists, ForeignForm, Refused, printable, reason_of
from cachectl.layers.facts import Ability, Note
from cachectl.signing import Untrusted, signer

if TYPE_CHECKING:
    from cachectl.layers.layer import Layer
    from cachectl.stack import Stack

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Trust:
    """Why the bytes of a bundle are believed: exactly one of a list of signers, a sum, or the user's word."""

    allowed_signers: str | None = None
    sha256: str | None = None
    blindly: bool = False

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


@dataclass(frozen=True, slots=True)
class ImportedLayer:
    """What an import did with a layer, or (``dry_run``) would do.

    ``there`` counts entries that are here already, bit by bit; ``kept`` are different ones that were here and stay;
    ``useless`` counts what cannot be hit here, and so was not placed. ``exposed``: others could write where it was
    made. ``foreseen`` counts all entries by what can be expected of them here.
    """

    layer: str
    placed: int = 0
    bytes: int = 0
    there: int = 0
    useless: int = 0
    kept: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    foreseen: tuple[Foreseen, ...] = ()
    differences: tuple[Difference, ...] = ()
    exposed: bool = False


@dataclass(frozen=True, slots=True)
class Import:
    """What an import did, and why the file, of this SHA-256, was believed."""

    file: str
    sha256: str
    trusted: str
    dry_run: bool
    layers: tuple[ImportedLayer, ...]

    @property
    def failed(self) -> bool:
        """Tell whether a layer refused an entry, or there is no such layer."""
        return any(layer.failed for layer in self.layers)


@dataclass
class _Tally:
    """What has happened to the entries of one layer so far."""

    placed: int = 0
    bytes: int = 0
    there: int = 0
    useless: int = 0
    kept: list[Note] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    foreseen: Counter[Outlook] = field(default_factory=Counter)


def import_bundle(stack: Stack, file: str, trust: Trust, *, dry_run: bool = False) -> Import:
    """Place what a bundle holds and what can be hit here, and say what was done with every entry.

    Raises :class:`Untrusted` where nobody vouches for it, :class:`BadBundle` where it is not whole or would do more
    than announce entries, and then nothing was written. What a layer refuses is named in what is returned.
    """
    with private_copy(stack, file) as copy:
        size, digest = _measured(copy)
        trusted = _trusted(copy, file, digest, trust)
        manifest = _checked(copy, size)
        done = _Placing(stack, manifest, dry_run=dry_run)
        for item, data in _opened(copy, size).contents():
            done.take(item, data)
    return Import(file, digest, trusted, dry_run, done.told())


@contextmanager
def private_copy(stack: Stack, file: str) -> Iterator[BinaryIO]:
    """Read a file once, into one without a name: nobody can swap a byte between the check and the use."""
    from cachectl.exporting import unseen

    with open(file, "rb") as source, unseen(stack.environment) as copy:
        chunk = source.read(_CHUNK)
        if not chunk.startswith(MAGIC):
            # Before a device without end is copied.
            raise BadBundle(f"{file} is not compressed by zstd")
        while chunk:
            copy.write(chunk)
            chunk = source.read(_CHUNK)
        copy.flush()
        yield copy


def _measured(copy: BinaryIO) -> tuple[int, str]:
    copy.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: copy.read(_CHUNK), b""):
        digest.update(chunk)
    return copy.tell(), digest.hexdigest()


def _trusted(copy: BinaryIO, file: str, digest: str, trust: Trust) -> str:
    """Say who vouches for the copy. Raises :class:`Untrusted`."""
    if trust.allowed_signers is not None:
        return f"signed by {signer(copy, f'{file}.sig', trust.allowed_signers)}"
    if trust.sha256 is not None:
        if not hmac.compare_digest(digest, trust.sha256.lower()):
            message = f"{printable(file)}: its SHA-256 is {digest}, not the one that was given"
            raise Untrusted(message)
        return "its SHA-256 is the one that was given"
    return "you said so"


def _opened(copy: BinaryIO, size: int) -> Reader:
    copy.seek(0)
    return Reader(copy, size)


def _checked(copy: BinaryIO, size: int) -> Manifest:
    """Read everything once, so that every sum is known to hold before anything is placed."""
    reader = _opened(copy, size)
    for _ in reader.contents():
        pass
    return reader.manifest


class _Placing:
    """One layer after the other, entry by entry."""

    def __init__(self, stack: Stack, manifest: Manifest, *, dry_run: bool) -> None:
        self._stack = stack
        self._manifest = manifest
        self._dry_run = dry_run
        self._tallies = {name: _Tally() for name in manifest.fingerprints}
        self._differing = {
            name: differences(name, there, fingerprint(name, stack.environment))
            for name, there in manifest.fingerprints.items()
        }

    def take(self, item: Item, data: bytes) -> None:
        """Do with one entry what there is to do."""
        tally = self._tallies[item.layer]
        there = self._manifest.fingerprints[item.layer]
        seen = outlook(item, there, self._stack.environment, self._differing[item.layer])
        tally.foreseen[seen] += 1
        if item.layer not in self._stack:
            tally.failed.append(Note(item.key, "no layer of this name is here"))
        elif seen.hits is False:
            tally.useless += 1
        else:
            self._place(self._stack[item.layer], item, data, tally)

    def _place(self, layer: Layer, item: Item, data: bytes, tally: _Tally) -> None:
        try:
            if (here := self._here(layer, item)) is not None:
                if here == data:
                    tally.there += 1
                else:
                    tally.kept.append(Note(item.key, "a different entry is here, and stays"))
                return
            if self._dry_run:
                self._demand(layer, item)
            else:
                layer.put(item.key, artifact_of(item, data))
        except EntryExists:
            tally.kept.append(Note(item.key, "a different entry, or a damaged one, is here, and stays"))
        except FAILURES as error:
            tally.failed.append(Note(item.key, reason_of(error)))
        else:
            tally.placed += 1
            tally.bytes += item.bytes

    def _here(self, layer: Layer, item: Item) -> bytes | None:
        """Return what is under the key; what cannot be told is left to the placing."""
        if layer.abilities()[Ability.GET] is not None:
            return None
        try:
            artifact = layer.get(item.key)
        except FAILURES:
            if self._dry_run:
                raise
            # An interrupted write, say, which placing rolls back, or damage, over which it places nothing.
            return None
        return None if artifact is None else artifact.data

    @staticmethod
    def _demand(layer: Layer, item: Item) -> None:
        """Raise what :meth:`Layer.put` would, as far as that is known beforehand."""
        if (reason := layer.abilities()[Ability.PUT]) is not None:
            raise Refused(layer.name, f"cannot put: {reason}")
        if item.form not in layer.forms:
            raise ForeignForm(layer.name, f"takes {' or '.join(layer.forms)}, this is {item.form}")

    def told(self) -> tuple[ImportedLayer, ...]:
        """Return what was done, layer by layer."""
        return tuple(
            ImportedLayer(
                layer=name,
                placed=tally.placed,
                bytes=tally.bytes,
                there=tally.there,
                useless=tally.useless,
                kept=tuple(tally.kept),
                failed=tuple(tally.failed),
                foreseen=tuple(Foreseen(seen, entries) for seen, entries in tally.foreseen.items()),
                differences=self._differing[name],
                exposed=name in self._manifest.exposed,
            )
            for name, tally in self._tallies.items()
        )
