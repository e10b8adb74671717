"""Homes full of caches that the sweep of faults damages, and what lies in them."""

import hashlib
import os
import shutil
import sqlite3
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from injector import Injector
from support import mesa
from support.layers import got
from support.products import PRODUCTS

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.core.layer import get_many
from cachectl.layers.host.record import FILE as RECORD
from cachectl.stack import Stack

TESTS = Path(__file__).parent.parent
#: Files that are written again when entries go, or that sqlite leaves: no removal counts their bytes.
_NOT_FREED = ("index", "-shm", RECORD)
_BYSTANDERS = (".cache/other/file", ".cache/pytools/notes.txt", ".cache/pocl/kcache/README", ".nv/notes")


@dataclass(frozen=True)
class World:
    """A home full of caches, and the variables of its user."""

    path: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def stack(self, home: Path) -> Stack:
        """Return the layers of a copy, in which no other program is busy."""
        aside = home.parent / "processes"
        aside.mkdir(exist_ok=True)
        variables = {"HOME": str(home), **self.variables}
        return Stack(Environment(variables, home=home, cwd=home, temporary=home / "tmp", processes=aside))

    def keys(self, home: Path) -> dict[str, set[str]]:
        """Return the entries of each layer as ``ROOT KEY``, with the root below the home."""
        found: dict[str, set[str]] = {}
        with recovered(home) as whole:
            for entry in self.stack(whole).entries():
                found.setdefault(entry.layer, set()).add(f"{entry.root.relative_to(whole)} {entry.key}")
        return found

    def bytes(self, home: Path) -> int:
        """Return the bytes of all entries."""
        with recovered(home) as whole:
            return sum(entry.bytes for entry in self.stack(whole).entries())

    def unreadable(self, home: Path) -> list[str]:
        """Name the entries that cannot be read whole."""
        bad = []
        with recovered(home) as whole:
            for layer in self.stack(whole):
                with suppress(CachectlError):
                    read = get_many(layer, [entry.key for entry in layer.entries()]).items()
                    bad += [f"{layer.name} {key}: {found}" for key, found in read if isinstance(found, Exception)]
            return [text.replace(str(whole), "") for text in bad]


@contextmanager
def recovered(home: Path) -> Iterator[Path]:
    """Yield the home, or a copy in which sqlite has finished interrupted writes, as the next program would."""
    if not any(_unfinished(home)):
        yield home
        return
    copy = home.parent / "recovered"
    shutil.copytree(home, copy, symlinks=True)
    try:
        for file in list(_unfinished(copy)):
            with closing(sqlite3.connect(str(file).rpartition("-")[0])) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
        yield copy
    finally:
        shutil.rmtree(copy)


def _unfinished(home: Path) -> Iterator[Path]:
    """Yield the journals and logs of sqlite."""
    return (path for path in home.rglob("*") if path.name.endswith(("-journal", "-wal")))


def disk_bytes(home: Path) -> int:
    """Return the bytes that all files and folders take, but for indexes, which keep their size."""
    sizes = {}
    for path in (home, *home.rglob("*")):
        status = path.lstat()
        # What cachectl remembers of a home is in .local.
        if not stat.S_ISLNK(status.st_mode) and not path.name.endswith(_NOT_FREED) and ".local" not in path.parts:
            sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def bystanders(home: Path) -> dict[str, str]:
    """Hash the files that belong to no cache."""
    return {name: hashlib.sha256((home / name).read_bytes()).hexdigest() for name in _BYSTANDERS}


def leftovers(home: Path) -> list[str]:
    """Name what cachectl must not leave behind."""
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.name.startswith(".cachectl-") or path.name.endswith("-journal") or path.name == "lock"
    ]


#: What damaged things hold, so that each can be found wherever it lies.
_MARKS = tuple(f"damaged by the sweep, number {number}".encode() for number in range(9))
#: Files of which one each is damaged, and tables with the column of which one row is.
_DAMAGED_FILES = ("program.bc", "*.cl_cache", "llvmcache-*", ".nv/ComputeCache/?/?/*", "mesa_shader_cache/??/*")
_DAMAGED_ROWS = (("*.sqlite", "dict", "key_value"), ("*.ukdb", "kern_db", "kernel_blob"))


def damage(_injector: Injector, _world: World, home: Path) -> None:
    """Damage an entry of each kind that is there."""
    marks = iter(_MARKS)
    for pattern in _DAMAGED_FILES:
        for path in sorted(home.rglob(pattern))[:1]:
            path.write_bytes(next(marks))
            os.utime(path, (1.7e9, 1.7e9))
    for pattern, table, column in _DAMAGED_ROWS:
        for path in sorted(home.rglob(pattern))[-1:]:
            with closing(sqlite3.connect(path)) as connection, connection:
                first = f"(select min(rowid) from {table})"
                connection.execute(f"update {table} set {column} = ? where rowid = {first}", (next(marks),))
            os.utime(path, (1.7e9, 1.7e9))


# ---------------------------------------------------------------------- worlds


def synthetic_world(folder: Path) -> World:
    """Fill a home with what no library here can make: CUDA, NEO, comgr, Mesa, MIOpen."""
    home = folder / "home"
    home.mkdir(parents=True)
    for name in ("neo", "comgr", "mesa multi-file", "miopen", "miopen-tuning"):
        PRODUCTS[name].fill(home)
    _compute_cache(home / ".nv/ComputeCache", 6)
    return settled(World(home))


def _compute_cache(folder: Path, entries: int) -> None:
    """Unpack some entries that a CUDA driver wrote, with an index that lists them."""
    with tarfile.open(TESTS / "data/computecache-h200-opencl.tar.gz") as tar:
        names = sorted(member.name for member in tar if member.isfile() and not member.name.endswith("index"))
        for name in names[:entries]:
            tar.extract(name, folder, set_attrs=False)
    (folder / "index").touch()
    layer = Stack(Environment({"HOME": str(folder.parent.parent)}, home=folder.parent.parent))["cuda"]
    # Whatever is put, the index is written again.
    key = next(iter(layer.entries())).key
    layer.put(key, got(layer, key))


def mesa_world(folder: Path, store: str) -> World:
    """Fill one of Mesa's stores that keep many entries in one file, for a user who has chosen it."""
    home = folder / "home"
    home.mkdir(parents=True)
    mesa.fill(home / ".cache", store, mesa.contents())
    return settled(World(home, mesa.STORES[store]))


#: Homes that are made here, by name.
WORLDS: Mapping[str, Callable[[Path], World]] = {
    "synthetic": synthetic_world,
    **{f"mesa-{store}": partial(mesa_world, store=store) for store in ("single-file", "database")},
}


def filled_world(folder: Path, home: Path) -> World:
    """Copy a home that real programs have filled."""
    shutil.copytree(home, folder / "home", symlinks=True)
    return settled(World(folder / "home"))


def settled(world: World) -> World:
    """Add files that belong to no cache, and make everything old."""
    for name in _BYSTANDERS:
        path = world.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    (world.path / "tmp").mkdir(exist_ok=True)
    for path in (*world.path.rglob("*"), world.path):
        os.utime(path, (1.7e9, 1.7e9), follow_symlinks=False)
    return world
