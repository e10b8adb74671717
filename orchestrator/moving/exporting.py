"""Export: read the entries of a selection, one by one from caches that may be in use, into one bundle.

Every entry is read by its layer: a row in a transaction, a file or folder as a whole. Entries that vanish before they
are read are listed as skipped.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final, cast

from cachectl.inspecting.entries import Trouble, listed
from cachectl.layer_set import part_of
from cachectl.layers.base.as_json import AsJson, total
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest, reason_of
from cachectl.layers.base.facts import Ability, Artifact, Entry, Note, Scope
from cachectl.layers.base.selection import ALL, Selection
from cachectl.moving.bundle import Item, Manifest, Members, complaint, in_batches, write_manifest
from cachectl.moving.output_files import BUNDLE, SIGNATURE, OutputFile
from cachectl.moving.portability import portability_key
from cachectl.moving.transfer import demand_writable, place, signature_name, without_secrets
from cachectl.moving.whole_files import STREAM

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer

_CHUNK: Final = 1 << 20
_VANISHED: Final = "vanished meanwhile"


@dataclass(frozen=True, slots=True)
class ExportedLayer:
    """The export of one layer.

    ``sensitive`` says what its entries reveal, ``None`` if that is not known. ``exposed`` lists the folders in which
    another user could have put an entry.
    """

    layer: str
    entries: int
    bytes: int
    portability_key: Mapping[str, str | None]
    sensitive: str | None = None
    exposed: tuple[Path, ...] = ()
    skipped: tuple[Note, ...] = ()
    failed: tuple[Note, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(names={"portability_key": "fingerprint", "exposed": "writable_by_others"})


@dataclass(frozen=True, slots=True)
class ExportTotal:
    """The sums over all layers."""

    entries: int
    bytes: int
    skipped: int
    failed: int


@dataclass(frozen=True, slots=True)
class Export:
    """A written bundle: its size in bytes, its SHA-256, and the signature beside it, if any.

    Without an entry nothing is written, and ``sha256`` is ``None``.
    """

    file: str
    bytes: int
    sha256: str | None
    signature: str | None
    layers: tuple[ExportedLayer, ...]
    as_json: ClassVar[AsJson] = AsJson(
        "cachectl/export/1", hidden=("file",), also=("written", "total"), names={"written": "file"}
    )

    @property
    def entries(self) -> int:
        """Return the number of entries in the bundle."""
        return sum(layer.entries for layer in self.layers)

    @property
    def written(self) -> str | None:
        """Return the file, or ``None`` if nothing was written."""
        return None if self.sha256 is None else self.file

    @property
    def total(self) -> ExportTotal:
        """Return the sums over all layers."""
        return total(ExportTotal, self.layers)

    @property
    def failed(self) -> bool:
        """Return whether nothing was written, or a requested entry or layer could not be read."""
        return self.sha256 is None or any(layer.failed for layer in self.layers)


@dataclass
class _Gathered:
    """The entries read so far, in their order in the bundle."""

    members: Members
    items: list[Item] = field(default_factory=list)
    skipped: dict[str, list[Note]] = field(default_factory=dict)
    failed: dict[str, list[Note]] = field(default_factory=dict)

    def add(self, entries: Sequence[Entry], layer: Layer) -> None:
        """Read entries of a layer, in the order of their keys."""
        skipped, failed = self.skipped.setdefault(layer.name, []), self.failed.setdefault(layer.name, [])
        for _, item, data in read_entries(layer, entries, skipped, failed, into="a bundle"):
            self.items.append(item)
            self.members.add(data)


def read_entries(
    layer: Layer, entries: Sequence[Entry], skipped: list[Note], failed: list[Note], *, into: str
) -> Iterator[tuple[Entry, Item, bytes]]:
    """Yield the entries that can be read, each with its line for a manifest and its bytes.

    The others are added to ``skipped`` or ``failed``; ``into`` says in their reasons where an entry does not fit.
    """
    keys = [entry.key for entry in entries]
    try:
        read = layer.get_many(keys)
    except FAILURES as error:
        read = dict.fromkeys(keys, error)
    for entry in entries:
        artifact = read.get(entry.key)
        if artifact is None:
            skipped.append(Note(entry.key, _VANISHED))
            continue
        if not isinstance(artifact, Artifact):
            failed.append(Note(entry.key, reason_of(artifact)))
            continue
        item = Item(
            layer=layer.name,
            key=entry.key,
            form=artifact.form,
            bytes=len(artifact.data),
            sha256=hashlib.sha256(artifact.data).hexdigest(),
            detail=dict(artifact.detail),
            device=entry.device,
            versions=dict(entry.versions),
        )
        # One such entry would keep all others from being read.
        if (unfit := complaint(item)) is not None:
            failed.append(Note(entry.key, f"does not fit into {into}: {unfit}"))
        else:
            yield entry, item, artifact.data


def export(
    stack: LayerSet,
    file: str,
    selection: Selection = ALL,
    *,
    layers: Iterable[str] = (),
    sign: str | None = None,
    force: bool = False,
) -> Export:
    """Write the selected entries of the named layers, or of every clearable layer, as a bundle.

    ``file`` is a path, a URL that fsspec knows, or ``-`` for standard output. ``sign`` is an OpenSSH key (``ssh-keygen
    -Y sign``); the signature is ``file`` with ``.sig``. An existing file is replaced only if it is a bundle, or with
    ``force``. Without an entry nothing is written.

    Raises :class:`CachectlError` if a package or the key is missing, a URL fails, or another file is in the way, and
    :class:`OSError` if the file cannot be written. The result names entries and layers that could not be read.
    """
    demand_writable(file)
    _demand_outputs(stack, file, sign, force=force)
    named = tuple(dict.fromkeys(layers))
    chosen = stack.chosen(named)
    with unseen(stack.environment) as spool, unseen(stack.environment) as packed:
        gathered = _Gathered(Members(spool))
        for layer in _in_order(chosen):
            _gather(layer, selection, gathered, named=bool(named))
        made = None if sign is None else time_of_signing(stack.environment)
        parts, keys, exposed = _packed(stack, gathered, chosen, spool, packed, made=made)
        size, digest, signature = 0, None, None
        if gathered.items:
            # Reading takes long, and the places may have changed meanwhile.
            _demand_outputs(stack, file, sign, force=force)
            size, digest, signature = place_bundle(packed, file, sign)
    exported = tuple(
        ExportedLayer(
            layer=name,
            entries=len(items),
            bytes=sum(item.bytes for item in items),
            portability_key=keys.get(name, {}),
            sensitive=stack[name].reveals if items else None,
            exposed=exposed.get(name, ()),
            skipped=tuple(gathered.skipped.get(name, ())),
            failed=tuple(gathered.failed.get(name, ())),
        )
        for name, items in parts.items()
    )
    return Export(without_secrets(file), size, digest, signature, exported)


def _demand_outputs(stack: LayerSet, file: str, sign: str | None, *, force: bool) -> None:
    """Raise an error unless a bundle and its signature may be written to a place."""
    names = frozenset(layer.name for layer in stack)
    OutputFile(file, BUNDLE, names, force).demand()
    if sign is not None and file == STREAM:
        raise BadRequest("--sign writes FILE.sig, which needs a FILE: name one instead of standard output")
    if sign is not None:
        OutputFile(signature_name(file), SIGNATURE, names, force).demand()


def pack(stack: LayerSet, packed: BinaryIO, keys: Collection[tuple[str, str]]) -> None:
    """Write the entries of these layers and keys into an open file, as a bundle. Unreadable entries are left out."""
    chosen = tuple(layer for layer in stack.clearable() if layer.abilities()[Ability.GET] is None)
    with unseen(stack.environment) as spool:
        gathered = _Gathered(Members(spool))
        for layer in _in_order(chosen):
            found = (one for one in listed((layer,), ALL, lambda _: None) if (one.layer, one.key) in keys)
            _read(layer, found, gathered)
        _packed(stack, gathered, chosen, spool, packed)


def _in_order(layers: Iterable[Layer]) -> list[Layer]:
    """Order layers as their entries are ordered in a bundle."""
    return sorted(layers, key=lambda layer: layer.name)


def _packed(
    stack: LayerSet,
    gathered: _Gathered,
    chosen: tuple[Layer, ...],
    spool: BinaryIO,
    packed: BinaryIO,
    *,
    made: int | None = None,
) -> tuple[dict[str, tuple[Item, ...]], dict[str, dict[str, str | None]], dict[str, tuple[Path, ...]]]:
    """Write the gathered entries; return the items, the portability key and the exposed folders of each layer."""
    parts = {layer.name: tuple(item for item in gathered.items if item.layer == layer.name) for layer in chosen}
    keys = {
        name: portability_key(stack.portability(name), stack.environment, items)
        for name, items in parts.items()
        if items
    }
    exposed = {layer.name: exposed_folders(layer) for layer in chosen if parts[layer.name]}
    manifest = Manifest(tuple(gathered.items), keys, tuple(name for name, folders in exposed.items() if folders), made)
    gathered.members.finish(write_manifest(packed, manifest))
    spool.seek(0)
    shutil.copyfileobj(spool, packed, _CHUNK)
    return parts, keys, exposed


def time_of_signing(environment: Environment) -> int:
    """Return the time to write into a signed bundle: ``SOURCE_DATE_EPOCH`` if that is set, else now.

    Source: https://reproducible-builds.org/specs/source-date-epoch/
    """
    named = environment.get("SOURCE_DATE_EPOCH") or ""
    return int(named) if re.fullmatch("[0-9]{1,11}", named) else int(environment.clock())


def unseen(environment: Environment) -> BinaryIO:
    """Open an unnamed file, which nobody else can open and which vanishes with this process."""
    folder = environment.temporary
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder if folder.is_dir() else None))


def _gather(layer: Layer, selection: Selection, gathered: _Gathered, *, named: bool) -> None:
    reason = layer.abilities()[Ability.GET]
    if reason is not None:
        if named:
            gathered.failed.setdefault(layer.name, []).append(Note("*", f"cannot get: {reason}"))
        return

    def notice(trouble: Trouble) -> None:
        where = "*" if trouble.path is None else str(trouble.path)
        notes = gathered.failed if trouble.failed else gathered.skipped
        notes.setdefault(trouble.layer, []).append(Note(where, trouble.message))

    # Open entries only if the selection or the portability key needs their content.
    portability = part_of(layer, "portability")
    contents = selection.needs_contents or portability is None or not portability.named
    found = listed((layer,), selection, notice, contents=contents)
    # Entries that only share a root belong to another program.
    own = (entry for entry in found if entry.guest is None or selection.key is not None)
    _read(layer, own, gathered)


def _read(layer: Layer, entries: Iterable[Entry], gathered: _Gathered) -> None:
    """Read entries in the order of their keys. If several roots have a key, the first root is read."""
    first: dict[str, Entry] = {}
    for entry in entries:
        # This also chooses the root to read from.
        first.setdefault(entry.key, entry)
    ordered = (first[key] for key in sorted(first))
    for batch in in_batches(ordered, lambda entry: entry.layer, lambda entry: entry.bytes):
        gathered.add(batch, layer)


def exposed_folders(layer: Layer) -> tuple[Path, ...]:
    """Return the folders through which another user could have put code into a layer."""
    from cachectl.layers.disk.trust import open_to_others

    found: list[Path] = []
    for root in layer.roots():
        if root.scope is Scope.USER:
            with suppress(OSError):
                found.extend(open_to_others(root.path))
    return tuple(dict.fromkeys(found))


def place_bundle(packed: BinaryIO, file: str, sign: str | None) -> tuple[int, str, str | None]:
    """Sign the packed bundle and put it in its place; return its size, its SHA-256 and the place of the signature."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        packed.seek(0)
        for chunk in iter(lambda: packed.read(_CHUNK), b""):
            digest.update(chunk)
            yield chunk

    signature = None if sign is None else _signed(packed, sign)
    place(file, chunks())
    if signature is None:
        return packed.tell(), digest.hexdigest(), None
    place(signature_name(file), (signature,))
    return packed.tell(), digest.hexdigest(), without_secrets(signature_name(file))


def _signed(packed: BinaryIO, key: str) -> bytes:
    from cachectl.moving.signing import sign

    return sign(packed, key)
