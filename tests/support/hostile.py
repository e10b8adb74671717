"""Homes full of deceptive files, links and real entries, for the tests of hostile homes."""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from cachectl.config import Limits
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import nobody
from cachectl.layers.core.root import Scope
from cachectl.removal import RemovalPlan
from cachectl.show.document import json_bytes
from cachectl.stack import Stack
from cachectl.verbs.prune import plan_prune
from support import dictionaries, layers, miopen_kernels

PYTHON = dictionaries.PYTHON
DEAD = "3.1.4.final.0"
NAME37 = "ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
HEX32 = "00112233445566778899aabbccddeeff"
CODE = b"\x7fELF" + bytes(60)
THESIS = b"years of work, and no cache at all\n" * 3

#: Every variable that says where a layer's folder is.
PLACES = (
    *("XDG_CACHE_HOME", "POCL_CACHE_DIR", "CUDA_CACHE_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH"),
    *("MIOPEN_SYSTEM_DB_PATH", "HOME", "TMPDIR"),
)
WINDOWS_PLACES = ("LOCALAPPDATA", "APPDATA", "TEMP", "USERPROFILE", "WIN_PD_OVERRIDE_LOCAL_APPDATA")

#: Where in a home some layer's root is, under one of those variables.
BASES = (
    *("", "pytools", "pyopencl", "pocl/kcache", "pocl/uncached", "pocl", "NVIDIA/ComputeCache"),
    *(".cache/pytools", ".cache/pyopencl", ".cache/pocl/kcache", ".cache/pocl/uncached", ".cache/miopen"),
    *(".config/miopen", ".nv/ComputeCache", ".miopen/cache", ".miopen/db", "pytools/pytools/Cache"),
    *("pyopencl/pyopencl/Cache", "Library/Caches/pytools", "Library/Caches/pyopencl"),
)


def hash_tree(*folders: Path) -> dict[bytes, str]:
    """Describe every name below some folders: kind, mode, target of a link, hash of the content."""
    described: dict[bytes, str] = {}
    for folder in folders:
        described[os.fsencode(folder)] = _described(os.fsencode(folder))
        for above, names, files in os.walk(os.fsencode(folder)):
            for name in (*names, *files):
                path = os.path.join(above, name)
                described[path] = _described(path)
    return described


def _described(path: bytes) -> str:
    mode = os.lstat(path).st_mode
    held = ""
    if stat.S_ISLNK(mode):
        held = repr(os.readlink(path))
    elif stat.S_ISREG(mode):
        # Only the superuser can read a file that is closed to all.
        with contextlib.suppress(PermissionError), open(path, "rb") as file:
            held = hashlib.sha256(file.read()).hexdigest()
    return f"{mode:o} {held}"


def changed(before: Mapping[bytes, str], after: Mapping[bytes, str]) -> set[bytes]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def write(path: Path, content: bytes = THESIS, mode: int = 0o644) -> None:
    layers.write(path, content).chmod(mode)


def database(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    layers.sql(path, script)


def link(folder: Path, outside: Path) -> None:
    """Put every kind of link under names that a layer would recognise, and pipes and sockets."""
    dictionary = f"pdict-v5-far-{PYTHON}.sqlite"
    base = f"pyopencl-compiler-cache-v2-py{PYTHON}"
    links = {
        # To a file, absolutely and relatively, and a chain of them.
        f"pdict-v5-file-{PYTHON}.sqlite": outside / dictionary,
        f"pdict-v5-near-{PYTHON}.sqlite": Path(os.path.relpath(outside / dictionary, folder)),
        f"pdict-v5-chain-{PYTHON}.sqlite": Path(f"pdict-v5-chain2-{PYTHON}.sqlite"),
        f"pdict-v5-chain2-{PYTHON}.sqlite": Path(f"pdict-v5-file-{PYTHON}.sqlite"),
        "gfx90a40.ukdb": outside / "gfx90a6e.ukdb",
        "gfx90a40.HIP.3_3_0_a85.ufdb.txt": outside / "gfx90a6e.HIP.3_3_0_a85.ufdb.txt",
        # To a folder: in the place of an entry, and of the folder above entries.
        f"LM/{NAME37}": outside / "AB" / NAME37,
        "CD": outside / "AB",
        base: outside / base,
        "c": outside / "a",
        "3.2.0": outside / "3.3.0",
        f"pdict-v4-far-py{DEAD}": outside / f"pdict-v4-near-py{DEAD}",
        ".cachectl-trash-" + "1" * 32: outside,
        "_UNCACHED_B1b2c3": outside / "AB" / NAME37,
        # To nothing, to itself, and to the folder it lies in.
        f"pdict-v5-gone-{PYTHON}.sqlite": Path("nowhere"),
        f"EF/{NAME37}": Path(NAME37),
        "GH": Path(".."),
        "MN": Path(),
        "tempfile_B1b2c3": Path("lock"),
    }
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    for name in ("tempfile_C1b2c3", f"pdict-v5-hard-{PYTHON}.sqlite", "e/f/0123456789abcd"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(outside / "thesis.tex", folder / name)
    for kind, number in ((stat.S_IFIFO, 1), (stat.S_IFSOCK, 2)):
        names = (f"pdict-v5-x{number}-{PYTHON}.sqlite", f"tempfile_D1b2c{number}", f"d/f/0123456789abc{number}")
        for name in (*names, f"gfx90a3{number}.ukdb", f"NO/{NAME37[:-1]}{'AB'[number - 1]}"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.mknod(folder / name, kind | 0o600)


def put_dictionary(root: Path) -> Path:
    rows = {f"{number:040x}": b"value" for number in range(3)}
    return dictionaries.dictionary(root / f"pdict-v5-far-{PYTHON}.sqlite", rows)


def put_old_dictionary(root: Path) -> Path:
    entry = root / f"pdict-v4-near-py{DEAD}/abc/def/0123456789ab"
    write(entry / "key")
    write(entry / "contents")
    return entry


def put_binary(root: Path) -> Path:
    entry = root / f"pyopencl-compiler-cache-v2-py{PYTHON}" / HEX32
    for name in ("source.cl", "binary", "info"):
        write(entry / name)
    return entry


def put_program(root: Path) -> Path:
    entry = root / "HG" / NAME37
    write(entry / "program.bc", b"BC\xc0\xde" + bytes(60))
    write(entry / "k/1-1-1/k.so", CODE)
    return entry


def put_leaked(root: Path) -> Path:
    write(root / "tempfile_Q1w2E3", b"", 0o600)
    return root / "tempfile_Q1w2E3"


def put_kernels(root: Path) -> Path:
    return miopen_kernels.store(root / "gfx908c0.ukdb", {("n.o", "-a"): (b"\0", "h", 1)})


def put_object(root: Path) -> Path:
    path = root / "1.8.0" / HEX32 / "kernel.o"
    write(path, CODE)
    return path


def put_results(root: Path) -> Path:
    path = root / "gfx908c0.HIP.2_3_0_a85.ufdb.txt"
    write(path, b"1x1=Solver:0.5,0,Algorithm\n")
    return path


#: Real content by the layers that recognise it. Dictionaries and databases stay as files, without their rows.
RECOGNISED: Mapping[str, tuple[Callable[[Path], Path], ...]] = {
    "pytools": (put_dictionary, put_old_dictionary),
    "pyopencl": (put_binary,),
    "pocl": (put_program, put_leaked),
    "miopen": (put_kernels, put_object),
    "miopen-tuning": (put_results,),
}


class World:
    """A hostile home, what its links lead to, and an empty home for all variables that are not tried."""

    def __init__(self, top: Path) -> None:
        self.top, self.home, self.outside, self.empty = top, top / "home", top / "outside", top / "empty"
        for folder in (self.home, self.outside, self.empty / "tmp"):
            folder.mkdir(parents=True)
        nobody(self.top / "processes")
        write(self.outside / "thesis.tex")

    def environment(self, variables: Mapping[str, str], platform: str = "linux") -> Environment:
        """Describe an environment in which nothing outside this world is reached unless a variable says so."""
        inside = dict.fromkeys(("HOME", *WINDOWS_PLACES), str(self.empty))
        return Environment(
            {**inside, "TMPDIR": str(self.empty / "tmp"), **variables},
            home=self.empty,
            platform=platform,
            cwd=self.empty,
            temporary=self.empty / "tmp",
            processes=self.top / "processes",
            lock_timeout=0.05,
        )


def user_layers(stack: Stack) -> tuple[str, ...]:
    return tuple(layer.name for layer in stack if layer.about.scope is Scope.USER)


def look(stack: Stack) -> None:
    """Do each verb that looks, and check that what it says can be written as JSON."""
    plans = (
        stack.plan_clear(layers=user_layers(stack)),
        plan_prune(stack.clearable(), Limits(stale=True), lambda _: None),
    )
    for said in (stack.report(), stack.ls(), stack.verify(), *plans):
        require_json(said)


def applied(planned: RemovalPlan) -> int:
    """Apply a plan; return how many entries went."""
    result = planned.apply()
    require_json(result)
    return sum(outcome.removed for outcome in result.layers)


def require_json(said: object) -> None:
    document = json.loads(json_bytes(said))
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def is_plain(path: bytes) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)
