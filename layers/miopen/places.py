"""MIOpen's places and locks, the names of its folders and databases, and the facts in them.

Sources: ``src/db_path.cpp.in`` (also version suffix), ``src/binary_cache.cpp``, ``src/expanduser.cpp`` (places);
``src/include/miopen/handle.hpp`` (``GetDbBasename``), ``src/target_properties.cpp`` (device id), ``src/find_db.cpp``,
``src/include/miopen/execution_context.hpp`` (names); ``src/lock_file.cpp`` (locks).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final, NamedTuple

from cachectl.layers.base import declarations, errors, lazy
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Root, Scope
from cachectl.layers.disk import plain
from cachectl.layers.host.distributions import names_in

#: MIOpen reads each variable once, when it first needs it.
LIBRARIES: Final = ("libMIOpen",)
PACKAGED: Final = "these files belong to the package that MIOpen came with"
#: The role of roots in a temporary folder, which other users write to as well.
TEMPORARY: Final = "temporary"

#: Folders with databases below the prefix of a library; up to ROCm 5.1 each library had a folder.
_DATABASES: Final = ("share/miopen/db", "miopen/share/miopen/db")
_LINKER_FOLDERS: Final = "/etc/ld.so.conf.d"
_LIBRARY_FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")

#: ``3.3.0.a85ca8a54``; without a build id before 2.4, and with an empty one if built without git.
#: A colon would end the file's name in a key.
VERSION_FOLDER: Final = lazy.regex(r"\d+\.\d+\.\d+(?:\.[^/:]*)?")

_NUMBERS: Final = (
    "700 701 702 703 704 705 801 802 803 805 810 900 902 904 906 908 909 90a 90c 940 941 942 950 1010 1011 1012 1013 "
    "1030 1031 1032 1033 1034 1035 1036 1100 1101 1102 1103 1150 1151 1152 1153 1200 1201"
)
# Hex compute units follow the architecture without a separator, so a list must separate them.
_ARCHITECTURES: Final = sorted((f"gfx{number}" for number in _NUMBERS.split()), key=len, reverse=True)
_BASE: Final = lazy.regex(
    rf"(?P<arch>{'|'.join(_ARCHITECTURES)})(?P<modes>(?:_(?:no)?sramecc)?(?:_xnack)?)"
    r"(?:_(?P<decimal>\d+)|(?P<hexadecimal>[0-9a-f]+))?"
)
_RAW_BASE: Final = r"(?:batchnorm_)?(?P<base>gfx[0-9a-z]+(?:_[0-9a-z]+)*)"
_BACKEND: Final = lazy.regex(r"\.(?:HIPNOGPU|HIP|OpenCL)(?=\.)")
_VERSION: Final = lazy.regex(r"\.(?P<version>\d+_\d+_\d+(?:_[^.:]*)?)(?=\.)")
_SQLITE: Final = lazy.regex(rf"{_RAW_BASE}(?:_\d+\.\d+\.\d+)?\.(?P<kind>u?kdb|u?db)")
_TEXT: Final = lazy.regex(
    rf"{_RAW_BASE}(?P<backend>{_BACKEND.pattern})?(?:{_VERSION.pattern})?(?:\.fusion)?"
    r"\.(?P<kind>u?fdb\.txt|u?db\.txt|cd\.u?pdb\.txt)"
)
#: The installed ending for each ending of a user's file.
INSTALLED: Final = {"ukdb": "kdb", "ufdb.txt": "fdb.txt", "udb.txt": "db.txt", "cd.updb.txt": "cd.pdb.txt"}


@dataclass(frozen=True)
class UserPlace(declarations.Places):
    """A folder of the user: the variable that names it, its default below the home, and the folder of a moved one."""

    home: str = ""
    profile: str = ""
    below: str = ""

    def roots(self, environment: Environment) -> tuple[Root, ...]:
        """Return the folder, and those that MIOpen uses instead of a network home, or without a home."""
        if named := environment.get(self.variable):
            return (Root(expand(environment, named), Scope.USER, self.variable),)
        if environment.platform == "win32":
            home = environment.get("USERPROFILE") or environment.home
            return (Root(Path(home, self.profile), Scope.USER, "default (USERPROFILE)"),)
        temporary = temporary_folder(environment)
        home = environment.get("HOME") or "/"
        why = "HOME is not set, empty or /" if home == "/" else "where the home is on a network file system"
        fallbacks = (
            Root(temporary / self.home, Scope.USER, f"MIOpen 3.5's fallback ({why})", TEMPORARY),
            Root(temporary, Scope.USER, f"the fallback of MIOpen up to 3.3 ({why})", TEMPORARY),
        )
        if home == "/":
            return fallbacks
        first = Root(environment.absolute(home) / self.home, Scope.USER, "default")
        return (first, *(root for root in fallbacks if root.path != first.path))

    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Return MIOpen's own variable; MIOpen makes the folder."""
        del layer
        return {self.variable: str(folder / self.below)}


@dataclass(frozen=True)
class SystemPlace(declarations.Places):
    """The databases that came with MIOpen; ``expands`` says whether every ``~`` in the variable means the home."""

    variable: str = "MIOPEN_SYSTEM_DB_PATH"
    expands: bool = False
    #: Why the databases are not moved.
    reason: ClassVar[str] = f"{PACKAGED}; MIOpen finds them beside its library, or through MIOPEN_SYSTEM_DB_PATH"

    def roots(self, environment: Environment) -> tuple[Root, ...]:
        """Return the named folder, or one relative to each library that is found."""
        if named := environment.get(self.variable):
            path = expand(environment, named) if self.expands else environment.absolute(named)
            literal = "" if "~" not in named or self.expands else " (its ~ is taken as it stands)"
            return (Root(path, Scope.SYSTEM, self.variable + literal),)
        sources: dict[str, str] = {}
        for library in libraries(environment):
            sources.setdefault(os.path.realpath(library.parent.parent / _DATABASES[0]), f"beside {library}")
        for folder in (Path(prefix, below) for prefix in (*_prefixes(environment), "/usr") for below in _DATABASES):
            if folder.is_dir():
                sources.setdefault(os.path.realpath(folder), "a usual place, without a library beside it")
        return tuple(Root(Path(path), Scope.SYSTEM, source) for path, source in sources.items())

    def moved(self, layer: str, folder: Path) -> Mapping[str, str]:
        """Refuse to move a package's files."""
        raise errors.Refused(layer, f"cannot relocate: {self.reason}", folder)


#: Up to MIOpen 3.3 the variable names the folder itself; MIOpen 3.5 makes its version folder in it.
KERNELS: Final = UserPlace("MIOPEN_CUSTOM_CACHE_DIR", home=".cache/miopen", profile=".miopen/cache", below="miopen")
TUNING: Final = UserPlace("MIOPEN_USER_DB_PATH", home=".config/miopen", profile=".miopen/db", below="miopen-db")
SYSTEM_KERNELS: Final = SystemPlace(expands=True)
SYSTEM_TUNING: Final = SystemPlace(expands=False)


def expand(environment: Environment, text: str) -> Path:
    """Expand a path as MIOpen does: every ``~`` in it means the home folder, except on Windows."""
    if environment.platform == "win32":
        return environment.absolute(text)
    home = environment.get("HOME") or "/"
    return environment.absolute(text.replace("~", str(temporary_folder(environment)) if home == "/" else home))


def temporary_folder(environment: Environment) -> Path:
    """Return C++'s ``temp_directory_path``."""
    named = (environment.get(variable) for variable in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return environment.absolute(next(filter(None, named), environment.temporary))


def libraries(environment: Environment) -> tuple[Path, ...]:
    """Return every libMIOpen that a program could load, once, with links resolved."""
    found = (
        os.path.realpath(os.path.join(folder, name))
        for folder in dict.fromkeys(_library_folders(environment))
        for name in names_in(folder, "libMIOpen.so", "MIOpen.dll")
    )
    return tuple(Path(path) for path in dict.fromkeys(found))


def _prefixes(environment: Environment) -> Iterator[str]:
    for site in map(os.fspath, environment.site):
        yield f"{site}/torch"
        yield from (f"{site}/{name}" for name in names_in(site, "_rocm_sdk_"))
    rocm = environment.get("ROCM_PATH")
    if rocm:
        yield os.fspath(environment.absolute(rocm))
    yield "/opt/rocm"
    yield from (f"/opt/{name}" for name in names_in("/opt", "rocm-"))


def _library_folders(environment: Environment) -> Iterator[str]:
    for named in (environment.get("LD_LIBRARY_PATH") or "").split(":"):
        if named:
            yield os.fspath(environment.absolute(named))
    yield from (f"{prefix}/lib" for prefix in _prefixes(environment))
    for name in names_in(_LINKER_FOLDERS):
        if name.endswith(".conf"):
            with suppress(OSError):
                lines = plain.read_installed(f"{_LINKER_FOLDERS}/{name}").decode(errors="replace").splitlines()
                yield from (line.strip() for line in lines if line.startswith("/"))
    yield from _LIBRARY_FOLDERS


def lock_files(environment: Environment, path: Path) -> tuple[Path, ...]:
    """Return the lock files of a text database, for every version and every path of its folder.

    Up to 3.3 they lie in the temporary folder, named by the md5 of the folder's path as it was given; later they lie
    beside the database.
    """
    import hashlib

    paths = {str(path.parent), os.path.realpath(path.parent)}
    named = environment.get(TUNING.variable)
    if named and expand(environment, named) == path.parent:
        paths.add(named.rstrip("/"))
    temporary = temporary_folder(environment) / "miopen-lockfiles"
    digests = (hashlib.md5(os.fsencode(text), usedforsecurity=False).hexdigest() for text in paths)
    beside = path.parent / "miopen-lockfiles" / f"{path.name}.lock"
    return (beside, *sorted(temporary / f"{digest}_{path.name}.lock" for digest in digests))


# ---------------------------------------------------------------------- names of files

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
    parts = {"backend": None, "version": None, **match.groupdict()}
    version = folder or (parts["version"] or "").replace("_", ".", 3) or None
    backend = parts["backend"][1:] if parts["backend"] else None
    arch = device = units = None
    if (base := _BASE.fullmatch(match["base"])) is not None:
        arch, device = base["arch"], base["arch"] + base["modes"]
        units = int(base["decimal"] or base["hexadecimal"] or "0", 10 if base["decimal"] else 16) or None
    return DatabaseFile(file, match["kind"], match["base"], arch, device, units, backend, version, root, folder)


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
