"""``store verify``: read and check everything in a shared store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cachectl.layers.base.as_json import AsJson
from cachectl.moving.signing import Untrusted
from cachectl.sharing.format import (
    CondemnedName,
    Part,
    PartName,
    Stocked,
    cut,
    is_content,
    most_object,
    open_object,
    open_pack,
)
from cachectl.sharing.index import Gone, Index, Judge, ReadPart
from cachectl.sharing.place import BadStore, Missing

if TYPE_CHECKING:
    from cachectl.layers.base.environment import Environment
    from cachectl.sharing.place import Place


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """Something wrong with a name of a store; a note does not harm readers."""

    name: str
    severity: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """The findings in a store, and how much was checked."""

    url: str
    store: str
    digest: str
    parts: int
    entries: int
    packs: int
    objects: int
    findings: tuple[StoreFinding, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/store-verify/1")

    @property
    def failed(self) -> bool:
        """Return whether anything is damaged, missing or not trusted."""
        return any(one.severity == "error" for one in self.findings)


def check(place: Place, environment: Environment, allowed_signers: str | None = None) -> StoreCheck:
    """Check every index part, key document, pack, object and entry of a store.

    With ``allowed_signers`` a part that no such signer has signed is a finding too. Raises :class:`Missing` if there is
    no store.
    """
    # Before the index: a writer adds packs first.
    contents = {one.name for one in place.contents() if is_content(one.name)}
    index = Index(place, environment)
    store = index.demand()
    checking = _Checking(index, None if allowed_signers is None else Judge(environment, allowed_signers))
    checking.check()
    findings = [*checking.findings, *_unlisted(contents, checking.places)]
    packs = sum(name.startswith("packs/") for name in checking.places)
    index.save()
    return StoreCheck(
        *(place.shown, store, index.names.digest, len(index.names.parts), checking.entries),
        *(packs, len(checking.places) - packs, tuple(findings)),
    )


def _unlisted(contents: set[str], listed: dict[str, list[tuple[Part, Stocked]]]) -> Iterator[StoreFinding]:
    for name in sorted(contents - listed.keys()):
        yield StoreFinding(
            name, "note", "unlisted", "no part of the index lists it; cachectl store gc removes it later"
        )


class _Checking:
    def __init__(self, index: Index, judge: Judge | None) -> None:
        self._index = index
        self._judge = judge
        self.findings: list[StoreFinding] = []
        self.places: dict[str, list[tuple[Part, Stocked]]] = {}
        self.entries = 0

    def check(self) -> None:
        """Check the index, then what it lists."""
        names = self._index.names
        for store in names.stores[1:]:
            message = "two first pushes met; the oldest identity counts"
            self._add(f"index/store-{store}", "note", "two-stores", message)
        for key in sorted(names.keys):
            try:
                self._index.key(key)
            except BadStore as error:  # noqa: PERF203
                self._add(f"index/key-{key}", "error", "damaged", str(error))
        for condemned in names.condemned:
            self._check_condemned(condemned)
        for part in names.parts:
            self._check_part(part)
        for place, group in self.places.items():
            try:
                self._check_content(place, group)
            except Missing as error:  # noqa: PERF203
                if self._are_listed(group):
                    self._add(place, "error", "missing", str(error))
            except BadStore as error:
                self._add(place, "error", "damaged", str(error))

    def _add(self, name: str, severity: str, code: str, message: str) -> None:
        self.findings.append(StoreFinding(name, severity, code, message))

    def _check_condemned(self, name: CondemnedName) -> None:
        try:
            self._index.condemned(name)
        except BadStore as error:
            self._add(f"index/{name}", "error", "damaged", f"{error}; remove it")

    def _check_part(self, name: PartName) -> None:
        shown = f"index/{name}"
        try:
            read = self._index.read(name)
            self._index.key(name.key)
            self._check_signature(read)
        except Gone as error:
            self._index.list()
            if name in self._index.names.parts:
                self._add(shown, "error", "missing", str(error))
            return
        except BadStore as error:
            self._add(shown, "error", "damaged", str(error))
            return
        if read.part.store != self._index.names.store:
            self._add(shown, "note", "other-identity", "no reader takes it, because another identity counts")
        self.entries += len(read.part.entries)
        for one in read.part.entries:
            self.places.setdefault(one.place, []).append((read.part, one))

    def _check_signature(self, read: ReadPart) -> None:
        if self._judge is not None:
            try:
                self._judge.signer(read)
            except Untrusted as error:
                self._add(f"index/{read.name}", "error", "untrusted", str(error))

    def _check_content(self, place: str, group: list[tuple[Part, Stocked]]) -> None:
        part, first = group[0]
        name = place.rpartition("/")[2]
        if first.pack is None:
            size = first.item.bytes
            open_object(name, self._index.place.read(place, most_object(size)), size)
            if any(one.item.bytes != size for _, one in group):
                raise BadStore(f"{place} has several sizes in the index")
            return
        packed, size = part.packs[first.pack]
        content = open_pack(name, self._index.place.read(place, packed), size)
        for _, one in group:
            cut(one, content)

    def _are_listed(self, group: list[tuple[Part, Stocked]]) -> bool:
        """Return whether what is missing is still listed: ``gc`` may have removed the parts meanwhile."""
        before = {part.made for part, _ in group}
        self._index.list()
        return any(name.made in before for name in self._index.names.parts)
