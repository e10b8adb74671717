"""File and folder names of MIOpen's caches and databases, and the facts in them.

Sources: ``src/include/miopen/handle.hpp`` (``GetDbBasename``), ``src/target_properties.cpp`` (device id),
``src/db_path.cpp.in`` (version suffix), ``src/find_db.cpp``, ``src/include/miopen/execution_context.hpp``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from cachectl.layers.base.facts import Root, Scope
from cachectl.layers.base.lazy import regex

#: ``3.3.0.a85ca8a54``; without a build id before 2.4, and with an empty one if built without git.
#: A colon would end the file's name in a key.
VERSION_FOLDER: Final = regex(r"\d+\.\d+\.\d+(?:\.[^/:]*)?")

_NUMBERS: Final = (
    "700 701 702 703 704 705 801 802 803 805 810 900 902 904 906 908 909 90a 90c 940 941 942 950 1010 1011 1012 1013 "
    "1030 1031 1032 1033 1034 1035 1036 1100 1101 1102 1103 1150 1151 1152 1153 1200 1201"
)
# Hex compute units follow the architecture without a separator, so a list must separate them.
_ARCHITECTURES: Final = sorted((f"gfx{number}" for number in _NUMBERS.split()), key=len, reverse=True)
_BASE: Final = regex(
    rf"(?P<arch>{'|'.join(_ARCHITECTURES)})(?P<modes>(?:_(?:no)?sramecc)?(?:_xnack)?)"
    r"(?:_(?P<decimal>\d+)|(?P<hexadecimal>[0-9a-f]+))?"
)
_RAW_BASE: Final = r"(?:batchnorm_)?(?P<base>gfx[0-9a-z]+(?:_[0-9a-z]+)*)"
_BACKEND: Final = regex(r"\.(?:HIPNOGPU|HIP|OpenCL)(?=\.)")
_VERSION: Final = regex(r"\.(?P<version>\d+_\d+_\d+(?:_[^.:]*)?)(?=\.)")
_SQLITE: Final = regex(rf"{_RAW_BASE}(?:_\d+\.\d+\.\d+)?\.(?P<kind>u?kdb|u?db)")
_TEXT: Final = regex(
    rf"{_RAW_BASE}(?P<backend>{_BACKEND.pattern})?(?:{_VERSION.pattern})?(?:\.fusion)?"
    r"\.(?P<kind>u?fdb\.txt|u?db\.txt|cd\.u?pdb\.txt)"
)
#: The installed ending for each ending of a user's file.
INSTALLED: Final = {"ukdb": "kdb", "ufdb.txt": "fdb.txt", "udb.txt": "db.txt", "cd.updb.txt": "cd.pdb.txt"}


NOWHERE: Final = Root(Path(), Scope.USER, "")


class DatabaseFile(NamedTuple):
    """A database file of a root, or of none, and the facts in its name. ``kind`` is its ending.

    ``base`` names the device and its compute units, which are unknown without a known architecture. ``device`` is the
    architecture with its sramecc and xnack modes: the name of databases for all compute units. ``version`` is that of
    MIOpen, with dots, from the folder or the name.
    """

    file: str
    kind: str
    base: str
    arch: str | None = None
    device: str | None = None
    units: int | None = None
    backend: str | None = None
    version: str | None = None
    root: Root = NOWHERE
    folder: str = ""

    @property
    def relative(self) -> str:
        """The path below the root."""
        return f"{self.folder}/{self.file}" if self.folder else self.file

    @property
    def path(self) -> Path:
        """The path."""
        return self.root.path / self.relative

    @property
    def bases(self) -> tuple[str, str]:
        """The base, and the base without modes: variables may hide which mode a GPU has."""
        return self.base, f"{self.arch or ''}{self.base.removeprefix(self.device or '')}"

    @property
    def versions(self) -> dict[str, str]:
        """The version as entries have it."""
        return {} if self.version is None else {"miopen": self.version}

    @property
    def detail(self) -> dict[str, str]:
        """The other facts in the name."""
        known = {"base": self.base, "compute_units": self.units, "backend": self.backend}
        return {name: str(value) for name, value in known.items() if value is not None}


def parse_name(file: str, root: Root = NOWHERE, folder: str = "") -> DatabaseFile | None:
    """Read the name of a database file; ``None`` for other names."""
    # Folders of libraries hold hundreds of other names.
    match = (_SQLITE.fullmatch(file) or _TEXT.fullmatch(file)) if "gfx" in file else None
    if match is None:
        return None
    facts = {"backend": None, "version": None, **match.groupdict()}
    version = folder or (facts["version"] or "").replace("_", ".", 3) or None
    backend = facts["backend"][1:] if facts["backend"] else None
    base = _BASE.fullmatch(match["base"])
    if base is None:
        return DatabaseFile(file, match["kind"], match["base"], None, None, None, backend, version, root, folder)
    units = int(base["decimal"] or base["hexadecimal"] or "0", 10 if base["decimal"] else 16) or None
    device = base["arch"] + base["modes"]
    return DatabaseFile(file, match["kind"], base[0], base["arch"], device, units, backend, version, root, folder)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return major, minor and patch; build ids have no order."""
    return tuple(int(part) for part in version.split(".")[:3])


def newest(versions: Iterable[str]) -> str | None:
    """Return the highest version; ``None`` where there is none."""
    return max(versions, key=version_numbers, default=None)


def program_names(kernel_name: str) -> tuple[str, ...]:
    """Return the names by which a user may select a program: without ``.o``, and without the ending of its source."""
    program = kernel_name.removesuffix(".obj").removesuffix(".o")
    return tuple(dict.fromkeys((program, PurePosixPath(program).stem)))


def installed_names(name: DatabaseFile) -> tuple[str, ...]:
    """Return the installed names of a user's file: for its device and compute units, and for all units of the device.

    A perf-db loses its backend, and every file its version. An installed file has its own name.
    """
    if name.kind not in INSTALLED:
        return (name.file,)
    plain = _VERSION.sub("", name.file).removesuffix(name.kind)
    if name.kind in ("udb.txt", "cd.updb.txt"):
        plain = _BACKEND.sub("", plain)
    installed = plain + INSTALLED[name.kind]
    return tuple(dict.fromkeys((installed, installed.replace(name.base, name.device or name.base, 1))))
