"""MIOpen's database files: their names and the facts in these, their places in a root, and what their stores share.

Sources: ``src/include/miopen/handle.hpp`` (``GetDbBasename``), ``src/target_properties.cpp`` (device id),
``src/find_db.cpp``, ``src/include/miopen/execution_context.hpp`` (names), ``src/db_path.cpp.in`` (version suffix).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from cachectl.layers import miopen
from cachectl.layers.base.errors import BadRequest, Refused, not_a_key
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import printable
from cachectl.layers.core.entry import Entry, Found
from cachectl.layers.core.finding import Finding
from cachectl.layers.core.root import Root
from cachectl.layers.core.selection import ALL, Selection
from cachectl.layers.core.store import ENTRY, FOREIGN, OWN
from cachectl.layers.core.switch import Ability
from cachectl.layers.disk import plain
from cachectl.layers.formats.details import Details
from cachectl.layers.host import record
from cachectl.layers.miopen import releases
from cachectl.layers.stores import database, row_store

#: Separates the parts of a key: file, kernel name and arguments; or file and record.
SEPARATOR = "::"
#: ``3.3.0.a85ca8a54``; no build id before 2.4, an empty one without git. A colon would end the file's name in a key.
VERSION_FOLDER = regex(r"\d+\.\d+\.\d+(?:\.[^/:]*)?")
_NUMBERS = (
    "700 701 702 703 704 705 801 802 803 805 810 900 902 904 906 908 909 90a 90c 940 941 942 950 1010 1011 1012 1013 "
    "1030 1031 1032 1033 1034 1035 1036 1100 1101 1102 1103 1150 1151 1152 1153 1170 1171 1172 1200 1201 1250 1251"
)
# Hex compute units follow the architecture without a separator, so only a list can distinguish them.
_ARCHITECTURES = sorted((f"gfx{number}" for number in _NUMBERS.split()), key=len, reverse=True)
_BASE = regex(
    rf"(?P<arch>{'|'.join(_ARCHITECTURES)})(?P<modes>(?:_(?:no)?sramecc)?(?:_xnack)?)"
    r"(?:_(?P<decimal>\d*)|(?P<hexadecimal>[0-9a-f]+))?"
)
# A device may report no number of units. With OpenCL it may be of any maker and have any name.
_OTHER_DEVICE = r"[^/:.]+_\d+(?=\.(?:ukdb\Z|OpenCL\.))"
_RAW_BASE = rf"(?:batchnorm_)?(?P<base>gfx[0-9a-z]+(?:_[0-9a-z]+)*_?|{_OTHER_DEVICE})"
_BACKEND = regex(r"\.(?:HIPNOGPU|HIP|OpenCL)(?=\.)")
_VERSION = regex(r"\.(?P<version>\d+_\d+_\d+(?:_[^.:]*)?)(?=\.)")
KERNEL_FILE = rf"{_RAW_BASE}(?:_\d+\.\d+\.\d+)?\.(?P<kind>u?kdb|u?db)"
_SQLITE = regex(KERNEL_FILE)
TEXT_FILE = regex(
    rf"{_RAW_BASE}(?P<backend>{_BACKEND.pattern})?(?:{_VERSION.pattern})?(?:\.fusion)?"
    r"\.(?P<kind>u?fdb\.txt|u?db\.txt|cd\.u?pdb\.txt)"
)
#: The installed ending for each ending of a user's file.
INSTALLED = {"ukdb": "kdb", "ufdb.txt": "fdb.txt", "udb.txt": "db.txt", "cd.updb.txt": "cd.pdb.txt"}
#: Problems of a package's files that another command fixes, or none.
_OTHER_FIXES = ("wal", "foreign", "unreadable", "link")


class DatabaseFile(NamedTuple):
    """A database file by its path below the root, and the facts in its name. ``kind`` is its ending.

    ``base`` names the device and its compute units; without a known architecture these are unknown. ``device`` is the
    architecture with its sramecc and xnack modes, as in names of databases for all compute units. ``version`` is that
    of MIOpen, with dots, from the folder or the name.
    """

    relative: str
    kind: str
    base: str
    arch: str | None = None
    device: str | None = None
    units: int | None = None
    backend: str | None = None
    version: str | None = None

    @property
    def bases(self) -> tuple[str, str]:
        """The base, and the base without modes, which variables may hide."""
        return self.base, f"{self.arch or ''}{self.base.removeprefix(self.device or '')}"

    @property
    def versions(self) -> dict[str, str]:
        """The version in the form that entries have."""
        return {} if self.version is None else {"miopen": self.version}

    @property
    def detail(self) -> dict[str, str]:
        """The other facts in the name."""
        known = {"base": self.base, "compute_units": self.units, "backend": self.backend}
        return {name: str(value) for name, value in known.items() if value is not None}

    @property
    def installed_names(self) -> tuple[str, ...]:
        """The installed names for a user's file: for its device and compute units, and for all units of the device.

        They have no version, and for a perf-db no backend. For an installed file it is its own name.
        """
        file = self.relative.rpartition("/")[2]
        if self.kind not in INSTALLED:
            return (file,)
        stripped = _VERSION.sub("", file).removesuffix(self.kind)
        if self.kind in ("udb.txt", "cd.updb.txt"):
            stripped = _BACKEND.sub("", stripped)
        installed = stripped + INSTALLED[self.kind]
        return tuple(dict.fromkeys((installed, installed.replace(self.base, self.device or self.base, 1))))


def parse_name(relative: str) -> DatabaseFile | None:
    """Read the name of a database file; ``None`` for other names."""
    folder, _, file = relative.rpartition("/")
    # Library folders hold hundreds of other names.
    match = (_SQLITE.fullmatch(file) or TEXT_FILE.fullmatch(file)) if file.endswith(("db", ".txt")) else None
    if match is None:
        return None
    parts = {"backend": None, "version": None, **match.groupdict()}
    version = folder or (parts["version"] or "").replace("_", ".", 3) or None
    backend = parts["backend"][1:] if parts["backend"] else None
    arch = device = units = None
    if (base := _BASE.fullmatch(match["base"])) is not None:
        arch, device = base["arch"], base["arch"] + base["modes"]
        units = int(base["decimal"] or base["hexadecimal"] or "0", 10 if base["decimal"] else 16) or None
    return DatabaseFile(relative, match["kind"], match["base"], arch, device, units, backend, version)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return major, minor and patch; build ids are not ordered."""
    return tuple(int(part) for part in version.split(".")[:3])


def program_names(kernel_name: str) -> tuple[str, ...]:
    """Return the names by which a user may select a program: without ``.o``, also without the suffix of its source."""
    program = kernel_name.removesuffix(".obj").removesuffix(".o")
    return tuple(dict.fromkeys((program, PurePosixPath(program).stem)))


class MIOpenDatabases(row_store.Rows):
    """Entries of database files, and the user's other files next to them."""

    tables: MIOpenTables

    def scan(self, root: Root, selection: Selection = ALL, *, contents: bool = True) -> Iterator[Found]:
        """Yield the entries of each database, stale if the record shows that their MIOpen was removed from here."""
        sightings = releases.note_here(self.environment, reads=contents)
        moment = sightings.last_gone(releases.PRODUCT)
        judge = partial(_judged, sightings=sightings, are_known=releases.all_are_known(self.environment, sightings))
        for item in super().scan(root, selection, contents=contents):
            is_older = isinstance(item, Entry) and (item.latest or 0.0) < moment
            yield judge(item) if isinstance(item, Entry) and is_older else item

    def written(self, root: Root) -> Iterator[Path]:
        """Yield all files of a temporary folder too, where MIOpen opens also those of other users."""
        return super().written(root._replace(role=""))

    def verify(self, root: Root) -> Iterator[Finding]:
        """Check every file; a package's file is to be reinstalled, never removed."""
        for finding in super().verify(root):
            if self.tables.asked_first and finding.code not in _OTHER_FIXES:
                path = finding.root / (finding.key or "").partition(SEPARATOR)[0]
                yield finding._replace(fix=f"reinstall the package that {path} belongs to", thing=None)
            else:
                yield finding


class MIOpenTables(row_store.TableFormat):
    """Database files, whose names state device and version of MIOpen.

    No link is followed, and in a temporary folder only the user's own files count. ``asked_first`` is set for the files
    of a package, which are only read: it is the layer that MIOpen searches before them.
    """

    separator = SEPARATOR
    #: Endings of the layer's databases, of files that are only counted, and whether they may be in version folders.
    kinds: tuple[str, ...]
    counted: tuple[str, ...] = ()
    versioned = False
    #: The number of parts of a key that follow the file.
    parts: ClassVar[int]

    def __init__(self, asked_first: str = "") -> None:
        self.asked_first = asked_first
        if asked_first:
            self.kinds = tuple(INSTALLED[kind] for kind in self.kinds)
            into = f"{miopen.PACKAGED}; put into the layer {asked_first}, which MIOpen searches first"
            clear = f"{miopen.PACKAGED}; its package manager removes them"
            self.refusals = {Ability.PUT: into, Ability.CLEAR: clear}

    def named(self, relative: str) -> DatabaseFile | None:
        """Return the file of a relative path, whether or not it exists; ``None`` for other names."""
        file, folder = parse_name(relative), relative.rpartition("/")[0]
        if file is None or file.kind not in (*self.kinds, *self.counted):
            return None
        return file if not folder or (self.versioned and VERSION_FOLDER.fullmatch(folder)) else None

    def known(self, relative: str) -> DatabaseFile:
        """Return the file of a relative path. Raises :class:`LayerError` for other names."""
        if (named := self.named(relative)) is None:
            raise not_a_key(self.name, relative)
        return named

    def is_table(self, file: str) -> bool:
        """Compare with the names of databases, including those that are only counted."""
        return self.named(file) is not None

    def kind_of(self, root: Root, path: str) -> str:
        """Compare with keys of entries, and with names of databases, of files next to them, and of folders."""
        relative, *parts = path.split(SEPARATOR, self.parts)
        if parts:
            file = self.named(relative)
            is_entry = len(parts) == self.parts and any(parts) and file is not None and file.kind in self.kinds
            return ENTRY if is_entry else FOREIGN
        is_folder = self.versioned and VERSION_FOLDER.fullmatch(path) is not None
        return OWN if is_folder or self.is_table(database.without_companion(path)) else FOREIGN

    def counts(self, root: Root, status: os.stat_result) -> bool:
        """Return whether a file may be the user's: in a temporary folder it may be another's, or a link."""
        return root.role != miopen.TEMPORARY or (status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode))

    def present(self, root: Root) -> list[DatabaseFile]:
        """Return each file that may be used."""
        return [self.known(file) for file in self.tables(root) if isinstance(file, str)]

    def is_usable(self, root: Root, relative: str) -> bool:
        """Return whether a file exists and may be used. Raises :class:`OSError` if that cannot be determined."""
        status = None if _is_in_link(root, relative) else plain.status_at(root.path / relative)
        return status is not None and stat.S_ISREG(status.st_mode) and self.counts(root, status)

    def folders(self, root: Root) -> Sequence[str]:
        """Return the folders of MIOpen's versions. Raises :class:`OSError` if the root cannot be listed."""
        try:
            with os.scandir(root.path) as items:
                versions = (item for item in items if self.versioned and VERSION_FOLDER.fullmatch(item.name))
                return sorted(item.name for item in versions if item.is_dir(follow_symlinks=False))
        except OSError as error:
            if plain.means_absent(error):
                return ()
            raise

    def place_of(self, root: Root, file: Path) -> Path | None:
        """Return the path below a root for a database file: that of the newest file for the same device.

        Without one, kernels belong to the version of MIOpen that the file's folder names, or to the newest known one.
        """
        if (named := parse_name(file.name)) is None:
            return None
        if named.kind in self.kinds and not self.versioned:
            return Path(file.name)
        installed, has_version = named.installed_names[0], VERSION_FOLDER.fullmatch(file.parent.name) is not None
        alike = [database for database in self.present(root) if installed in database.installed_names]
        if alike and not has_version:
            return Path(max(alike, key=lambda database: version_numbers(database.version or "0")).relative)
        if not self.versioned or not installed.endswith(".kdb"):
            return None
        versions = [file.parent.name] if has_version else self.folders(root)
        if not versions:
            advice = "put the file into a folder named after the version of MIOpen, such as 3.3.0.a85ca8a54"
            raise BadRequest(f"{printable(file)}: no MIOpen has kept kernels here; {advice}")
        return Path(max(versions, key=version_numbers), f"{installed.removesuffix('kdb')}ukdb")

    def with_name(self, entry: Entry) -> Entry:
        """Add device, version and the other facts."""
        named = self.known(entry.key)
        about = Details(None, named.arch or named.base, named.versions, named.detail)
        return entry._replace(details=about)

    def require_free(self, root: Root, file: str) -> None:
        """Raise :class:`Refused` if something else is in the place of a database."""
        path = root.path / file
        if not self.is_usable(root, file) and (_is_in_link(root, file) or plain.status_at(path) is not None):
            raise Refused(self.name, "cannot put: a link, a folder, or another user's file is there", path)


def _judged(entry: Entry, sightings: record.Record, *, are_known: bool) -> Entry:
    """Return an entry, stale if by the record no MIOpen can hit it: each opens only files of its own version."""
    version = entry.details.versions.get("miopen")
    if version is None:
        return entry
    numbers, by = version_numbers(version), f"stored by MIOpen {version}"
    if not are_known:
        return entry._replace(because=f"unknown: {by}, and not every MIOpen here can be read")
    stale, because = sightings.judge(
        # No form of the cache records hits.
        *(releases.PRODUCT, None, by),
        made=lambda known: known == version,
        hits=lambda known: version_numbers(known) == numbers,
    )
    return entry._replace(stale=stale, because=because)


def _is_in_link(root: Root, file: str) -> bool:
    """Return whether the version's folder of a file is a link. Raises :class:`OSError` if that is unknown."""
    status = plain.status_at((root.path / file).parent) if "/" in file else None
    return status is not None and stat.S_ISLNK(status.st_mode)
