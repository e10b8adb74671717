"""Folders that are not caches, under every variable that says where one is: nothing that is not recognised changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from homes import run_as
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from cachectl.clearing.prune import Limits, plan_prune
from cachectl.clearing.purge import PurgePlan, plan
from cachectl.cli import render
from cachectl.inspecting.entries import Trouble, findings
from cachectl.layers.base.conformance import nobody
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Scope
from cachectl.layers.base.selection import ALL
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

PYTHON = ".".join(str(part) for part in sys.version_info)
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


# ---------------------------------------------------------------------- what a folder holds


def fingerprint(*folders: Path) -> dict[bytes, str]:
    """Describe every name below some folders: kind, mode, where a link leads, and the hash of what it holds."""
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
        # What is closed to all is not to be read, but by the superuser.
        with contextlib.suppress(PermissionError), open(path, "rb") as file:
            held = hashlib.sha256(file.read()).hexdigest()
    return f"{mode:o} {held}"


def changed(before: Mapping[bytes, str], after: Mapping[bytes, str]) -> set[bytes]:
    """Name what was added, went, or is another."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def write(path: Path, content: bytes = THESIS, mode: int = 0o644) -> None:
    """Write a file of a mode, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def database(path: Path, script: str) -> None:
    """Make an sqlite file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.commit()


# ---------------------------------------------------------------------- the innocent

#: Names that come near to those of some layer, or have one that holds something else.
DECEPTIVE: Mapping[str, bytes] = {
    "pdict-v5-loopy-notes.sqlite": THESIS,
    f"pdict-v5-loopy-mine-{PYTHON}.sqlite": THESIS * 9,
    f"pdict-v5-loopy-empty-{PYTHON}.sqlite": b"",
    f"pdict-v5-mine-{DEAD}.sqlite": THESIS * 9,
    f"pdict-v5-mine-{DEAD}.sqlite.bak": THESIS,
    f"pdict-v5-alone-{DEAD}.sqlite-journal": THESIS,
    f"pdict-v6-mine-{DEAD}.sqlite": THESIS,
    f"pdict-v4-mine-py{DEAD}/notes.txt": THESIS,
    f"pdict-v4-mine-py{DEAD}/abc/def/0123456789ab/thesis.txt": THESIS,
    f"pdict-v4-mine-py{DEAD}/abc/def/012345678/contents": THESIS,
    f"pdict-v2-mine-py{DEAD}/0123456789abcdef/thesis.txt": THESIS,
    "pdict-v4-mine/abc/def/0123456789ab/contents": THESIS,
    f"pyopencl-compiler-cache-v2-py{DEAD}/lock": THESIS,
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32}/thesis.tex": THESIS,
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32}/binary": THESIS,
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32[1:]}/binary": THESIS,
    f"pyopencl-compiler-cache-v2-py/{HEX32}/binary": THESIS,
    f"AB/{NAME37}/program.bc": THESIS,
    f"AB/{NAME37}/thesis.tex": THESIS,
    f"AB/{NAME37[1:]}/program.bc": THESIS,
    f"AB/{NAME37}A/program.bc": THESIS,
    f"QZ/{NAME37}/program.bc": THESIS,
    f"ab/{NAME37}/program.bc": THESIS,
    f"BA/{NAME37}/program.bc/thesis.tex": THESIS,
    "program.bc": THESIS,
    "last_accessed": THESIS,
    "tempfile_abcdef": b"",
    "tempfile_A1b2c3": THESIS,
    "tempfile_A1b2c4.cl": THESIS,
    "_UNCACHED_A1b2c3/thesis.tex": THESIS,
    "_UNCACHED_thesis/program.bc": THESIS,
    "a/b/0123456789abcd": THESIS,
    "a/b/0123456789abc": THESIS,
    "a/b/0123456789abcde": THESIS,
    "a/index": THESIS,
    "index": THESIS,
    "gfx90a6e.ukdb": THESIS * 9,
    "3.3.0.a85/gfx90a6e.ukdb": THESIS * 9,
    f"3.3.0.a85/{HEX32}/notes.o": THESIS,
    f"{HEX32}/thesis.o": THESIS,
    f"{HEX32[1:]}/thesis.o": CODE,
    "gfx90a6e.HIP.3_3_0_a85.ufdb.txt": THESIS,
    "gfx90a6e.HIP.3_3_0_a85.ufdb.txt.bak": b"a=b:c\n",
    "gfx90a6e.udb": THESIS * 9,
    f".cachectl-stage-{HEX32[1:]}/thesis.tex": THESIS,
    ".cachectl-trash-notes/thesis.tex": THESIS,
    "lock": THESIS,
    "new\nline": THESIS,
    os.fsdecode(b"\xff\xfe"): THESIS,
    "-rf": THESIS,
    f"JK/{NAME37}/{'d/' * 40}thesis.tex": THESIS,
}
#: Those that somebody keeps to themselves: a mode is no proof that they are PoCL's.
PRIVATE = ("tempfile_abcdef", "tempfile_A1b2c3", "_UNCACHED_A1b2c3", "_UNCACHED_thesis")
FOREIGN_TABLES: Mapping[str, str] = {
    f"pdict-v5-diary-{DEAD}.sqlite": "create table diary (day, words); insert into diary values (1, 'dear diary')",
    f"pdict-v5-words-{DEAD}.sqlite": "create table dict (word, meaning); insert into dict values ('a', 'b')",
    f"pdict-v5-view-{DEAD}.sqlite": "create table t (keyhash, key_value); insert into t values ('a', 'b');"
    "create view dict as select rowid, * from t",
    f"pdict-v5-trap-{DEAD}.sqlite": "create table diary (words); insert into diary values ('dear diary');"
    "create table dict (keyhash text, key_value text); insert into dict values ('a', 'b');"
    "create trigger trap after delete on dict begin delete from diary; end",
    "gfx90a68.ukdb": "create table kern_db (kernel_of, truth); insert into kern_db values (1, 2)",
}


def settle(folder: Path, role: str) -> None:
    """Put what is deceptive into a folder that may be some layer's root."""
    for name, content in DECEPTIVE.items():
        write(folder / name, content)
    for name, script in FOREIGN_TABLES.items():
        database(folder / name, script)
    for name in PRIVATE:
        (folder / name).chmod(0o700 if (folder / name).is_dir() else 0o600)
    if role in ("kcache", "uncached"):
        # There, and only there, what is named like a temporary is PoCL's own, also where a word was drawn.
        (folder / "tempfile_abcdef").unlink()
        shutil.rmtree(folder / "_UNCACHED_thesis")
    else:
        write(folder / "tempdir_A1b2c3" / "thesis.tex")
        (folder / "tempdir_A1b2c3").chmod(0o700)


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


# ---------------------------------------------------------------------- the recognised


def put_dictionary(root: Path) -> Path:
    """Make a dictionary as pytools does."""
    path = root / f"pdict-v5-far-{PYTHON}.sqlite"
    rows = ";".join(f"insert into dict values ('{number:040x}', 'value')" for number in range(3))
    database(path, f"create table dict (keyhash text not null primary key, key_value text not null); {rows}")
    return path


def put_old_dictionary(root: Path) -> Path:
    """Make an entry of a dictionary of an older pytools."""
    entry = root / f"pdict-v4-near-py{DEAD}" / "abc" / "def" / "0123456789ab"
    write(entry / "key")
    write(entry / "contents")
    return entry


def put_binary(root: Path) -> Path:
    """Make a program as PyOpenCL does."""
    entry = root / f"pyopencl-compiler-cache-v2-py{PYTHON}" / HEX32
    for name in ("source.cl", "binary", "info"):
        write(entry / name)
    return entry


def put_program(root: Path) -> Path:
    """Make a program as PoCL does."""
    entry = root / "HG" / NAME37
    write(entry / "program.bc", b"BC\xc0\xde" + bytes(60))
    write(entry / "k" / "1-1-1" / "k.so", CODE)
    return entry


def put_leaked(root: Path) -> Path:
    """Make a temporary file as PoCL leaks it."""
    write(root / "tempfile_Q1w2E3", b"", 0o600)
    return root / "tempfile_Q1w2E3"


def put_kernels(root: Path) -> Path:
    """Make a database of kernels as MIOpen does."""
    path = root / "gfx908c0.ukdb"
    database(
        path,
        "create table kern_db (id integer primary key asc, kernel_name text not null, kernel_args text not null,"
        "kernel_blob blob not null, kernel_hash text not null, uncompressed_size int not null);"
        "insert into kern_db values (1, 'n.o', '-a', x'00', 'h', 1)",
    )
    return path


def put_object(root: Path) -> Path:
    """Make a kernel as an old MIOpen does."""
    path = root / "1.8.0" / HEX32 / "kernel.o"
    write(path, CODE)
    return path


def put_results(root: Path) -> Path:
    """Make results of tuning as MIOpen does."""
    write(root / "gfx908c0.HIP.2_3_0_a85.ufdb.txt", b"1x1=Solver:0.5,0,Algorithm\n")
    return root / "gfx908c0.HIP.2_3_0_a85.ufdb.txt"


#: Real content by the layers that recognise it. Dictionaries and databases stay as files, without their rows.
RECOGNISED: Mapping[str, tuple[Callable[[Path], Path], ...]] = {
    "pytools": (put_dictionary, put_old_dictionary),
    "pyopencl": (put_binary,),
    "pocl": (put_program, put_leaked),
    "miopen": (put_kernels, put_object),
    "miopen-tuning": (put_results,),
}


def still_holds(path: Path) -> bool:
    """Tell whether an entry is there; of a database, whether any row is."""
    if path.suffix not in (".sqlite", ".ukdb"):
        return os.path.lexists(path)
    with closing(sqlite3.connect(path)) as connection:
        table = "dict" if path.suffix == ".sqlite" else "kern_db"
        return bool(connection.execute(f"select count(*) from {table}").fetchone()[0])


# ---------------------------------------------------------------------- homes and what is done to them


@dataclass
class World:
    """A hostile home, what its links lead to, and an empty home for all variables that are not tried."""

    top: Path
    home: Path = field(init=False)
    outside: Path = field(init=False)
    empty: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.outside, self.empty = self.top / "home", self.top / "outside", self.top / "empty"
        for folder in (self.home, self.outside, self.empty / "tmp"):
            folder.mkdir(parents=True)
        nobody(self.top / "processes")
        write(self.outside / "thesis.tex")

    def environment(self, variables: Mapping[str, str], platform: str = "linux") -> Environment:
        """Describe an environment in which nothing outside this world is reached unless a variable says so."""
        return Environment(
            {**self.variables(), **variables},
            home=self.empty,
            platform=platform,
            cwd=self.empty,
            temporary=self.empty / "tmp",
            processes=self.top / "processes",
            patience=0.05,
        )

    def variables(self) -> dict[str, str]:
        """Return what keeps every layer inside the empty home."""
        names = {name: str(self.empty) for name in WINDOWS_PLACES}
        return {**names, "HOME": str(self.empty), "TMPDIR": str(self.empty / "tmp")}

    def run(self, *arguments: str, **variables: str) -> Any:  # noqa: ANN401 - JSON
        """Run a command, and return its JSON after looking at status and words."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
        done = run_as((), (*arguments, "--json"), {**kept, **self.variables(), **variables}, self.empty)
        said = done.stderr
        assert "Traceback" not in said
        assert all(line.startswith("cachectl: ") for line in said.splitlines()), said
        answer = json.loads(done.stdout)
        assert done.returncode == status_due(answer), said
        return answer


def status_due(answer: Mapping[str, Any]) -> int:
    """Return the status that the contract wants for what a verb has found."""
    schema = answer["schema"]
    if schema == "cachectl/purge/1":
        return int(answer["total"]["failed"] > 0)
    if schema == "cachectl/findings/1":
        return int(bool(answer["findings"]))
    if schema == "cachectl/ls/1":
        return int(any(problem["failed"] for problem in answer["problems"]))
    assert schema == "cachectl/report/1"
    return int(not answer["total"]["complete"])


def user_layers(stack: Stack) -> tuple[str, ...]:
    """Name every layer that may be cleared, those of precious content too."""
    return tuple(layer.name for layer in stack if layer.scope is Scope.USER)


def looked_at(stack: Stack) -> Iterator[object]:
    """Yield what every verb that only looks says, as it is printed."""
    report = stack.report()
    yield render.report_json(report)
    troubles: list[Trouble] = []
    entries = list(stack.entries(ALL, notice=troubles.append))
    yield render.entries_json(entries, troubles)
    yield render.findings_json(findings(stack))
    yield render.purge_json(stack.plan_clear(layers=user_layers(stack)).foreseen())
    yield render.purge_json(plan_prune(stack.expendable(), Limits(stale=True)).foreseen())


def is_json(value: object) -> bool:
    """Tell whether a value survives being written as JSON and read again."""
    return bool(json.loads(json.dumps(value, allow_nan=False)) == value)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a home of more than a thousand innocent files and every kind of link, which no test may change."""
    world = World(tmp_path_factory.mktemp("hostile"))
    for make in (maker for makers in RECOGNISED.values() for maker in makers):
        make(world.outside)
    (world.outside / "AB").mkdir()
    shutil.copytree(world.outside / "HG" / NAME37, world.outside / "AB" / NAME37)
    shutil.copytree(world.outside / "1.8.0", world.outside / "3.3.0")
    for base in BASES:
        settle(world.home / base, Path(base).name)
        link(world.home / base, world.outside)
    (world.top / "link").symlink_to(world.home)
    return world


def all_at_once(value: Path | str) -> dict[str, str]:
    """Point every variable at one place."""
    return dict.fromkeys((*PLACES, *WINDOWS_PLACES), str(value))


# ---------------------------------------------------------------------- a thousand innocent files


def test_the_home_is_as_large_and_as_deceptive_as_it_is_said_to_be(hostile: World) -> None:
    """There are a thousand files and more, and the eight kinds of links, pipes and sockets are among them."""
    kinds = [os.lstat(path).st_mode for path in fingerprint(hostile.home)]
    assert sum(map(stat.S_ISREG, kinds)) > 1000
    assert sum(map(stat.S_ISLNK, kinds)) > 8 * len(BASES)
    assert sum(map(stat.S_ISFIFO, kinds)) == sum(map(stat.S_ISSOCK, kinds)) > len(BASES)


@pytest.mark.parametrize(
    ("platform", "variable"),
    [
        *(("linux", variable) for variable in (*PLACES, "all", "all, through a link")),
        *(("darwin", variable) for variable in ("XDG_CACHE_HOME", "HOME")),
        *(("win32", variable) for variable in (*WINDOWS_PLACES, "all")),
    ],
)
def test_every_variable_in_turn_costs_nobody_anything(hostile: World, platform: str, variable: str) -> None:
    """A variable that points at a home: looking, purging and pruning leave all of it, and all it links to, as it was.

    Purged are also the precious layers, which ``--all`` leaves out.
    """
    place = hostile.top / "link" if variable == "all, through a link" else hostile.home
    variables = all_at_once(place) if variable.startswith("all") else {variable: str(place)}
    stack = Stack(hostile.environment(variables, platform), plugins=False)
    before = fingerprint(hostile.home, hostile.outside, hostile.empty)
    assert all(is_json(said) for said in looked_at(stack))
    for planned in (
        stack.plan_clear(layers=user_layers(stack)),
        stack.plan_clear(),
        plan_prune(stack.expendable(), Limits(stale=True)),
        plan_prune(stack.expendable(), Limits(bytes=0)),
    ):
        result = planned.apply()
        assert is_json(render.purge_json(result))
        assert sum(outcome.removed for outcome in result.outcomes) == 0
    assert changed(before, fingerprint(hostile.home, hostile.outside, hostile.empty)) == set()


@pytest.mark.parametrize("variable", [*PLACES, "all"])
def test_the_real_command_costs_nobody_anything_either(hostile: World, variable: str) -> None:
    """``purge --all`` and ``prune --stale`` as a user runs them leave the hash of everything as it was."""
    variables = all_at_once(hostile.home) if variable == "all" else {variable: str(hostile.home)}
    before = fingerprint(hostile.home, hostile.outside, hostile.empty)
    for verb in (("purge", "--all", "--wait", "0"), ("prune", "--stale", "--wait", "0")):
        assert hostile.run(*verb, **variables)["total"]["removed"] == 0
    assert changed(before, fingerprint(hostile.home, hostile.outside, hostile.empty)) == set()


@pytest.mark.parametrize("verb", ["report", "ls", "verify", "doctor"])
def test_every_verb_that_looks_says_json_and_writes_nothing(hostile: World, verb: str) -> None:
    """Over a home full of traps each verb that looks ends with the due status, JSON, and no traceback."""
    before = fingerprint(hostile.home, hostile.outside, hostile.empty)
    answer = hostile.run(verb, **all_at_once(hostile.home))
    assert changed(before, fingerprint(hostile.home, hostile.outside, hostile.empty)) == set()
    if verb == "report":
        # The traps were looked at, and seen for what they are.
        problems = {
            layer["layer"]: [p for root in layer["roots"] for p in root["problems"]] for layer in answer["layers"]
        }
        assert all(problems[name] for name in ("pytools", "loopy", "pyopencl", "pocl", "cuda", "miopen"))


@pytest.mark.parametrize("layer", RECOGNISED)
def test_what_is_recognised_does_go_from_between_the_innocent(tmp_path: Path, layer: str) -> None:
    """In the same kind of folder real entries are found and removed: it is not blindness that spares the others."""
    world = World(tmp_path)
    variables = {"POCL_CACHE_DIR": "pocl", "MIOPEN_CUSTOM_CACHE_DIR": "miopen", "MIOPEN_USER_DB_PATH": "miopen-tuning"}
    places = {name: str(world.home / place) for name, place in variables.items()}
    root = world.home / layer
    settle(root, "")
    before = fingerprint(root)
    made = [make(root) for make in RECOGNISED[layer]]
    stack = Stack(world.environment({"XDG_CACHE_HOME": str(world.home), **places}), plugins=False)
    result = stack.plan_clear(layers=[layer]).apply()
    assert [path for path in made if still_holds(path)] == []
    assert sum(outcome.removed for outcome in result.outcomes) >= 1
    after = fingerprint(root)
    assert {path: after.get(path) for path in before} == before


def test_somebodys_index_stays_when_the_entries_beside_it_go(
    tmp_path: Path, compute_cache: Callable[[Path], None]
) -> None:
    """CUDA's own index is written anew when entries go; a text of that name is left as it is, with all innocents."""
    world = World(tmp_path)
    compute_cache(world.home)
    (world.home / "index").unlink()
    real = {path for path in fingerprint(world.home) if _is_plain(path)}
    settle(world.home, "")
    before = {path: what for path, what in fingerprint(world.home).items() if path not in real}
    stack = Stack(world.environment({"CUDA_CACHE_PATH": str(world.home)}), plugins=False)
    (outcome,) = stack.plan_clear(layers=["cuda"]).apply().outcomes
    assert outcome.removed == len(real) > 0
    after = fingerprint(world.home)
    assert not real & after.keys()
    # Folders of CUDA's that are empty now may go; whatever is a file stays.
    innocent = {path: what for path, what in before.items() if what.startswith("100")}
    assert {path: after.get(path) for path in innocent} == innocent


def test_an_old_file_called_lock_that_pyopencl_did_not_make_stays(tmp_path: Path) -> None:
    """PyOpenCL's lock is an empty file: one with words in it, or a link, is somebody's, however old it is."""
    world = World(tmp_path)
    entry = put_binary(world.home / "pyopencl")
    lock = entry.parent / "lock"
    stack = Stack(world.environment({"XDG_CACHE_HOME": str(world.home)}), plugins=False)
    for linked in (False, True):
        if linked:
            lock.symlink_to(world.outside / "thesis.tex")
        else:
            write(lock)
        os.utime(lock, (1, 1), follow_symlinks=False)
        before = fingerprint(world.home, world.outside)
        (outcome,) = stack.plan_clear(layers=["pyopencl"]).apply().outcomes
        assert "remove the lock" in outcome.failed[0].because
        assert changed(before, fingerprint(world.home, world.outside)) == set()
        lock.unlink()
    write(lock, b"")
    os.utime(lock, (1, 1))
    assert stack.plan_clear(layers=["pyopencl"]).apply().outcomes[0].removed == 1


# ---------------------------------------------------------------------- random trees, variables, damage

NAMES = st.sampled_from(
    [
        *("AB", NAME37, "a", "b", "0123456789abcd", "index", "lock", "program.bc", "pytools", "pyopencl", "pocl"),
        *("kcache", ".cache", "miopen", "3.3.0.a85", HEX32, "gfx90a6e.ukdb", "gfx90a6e.HIP.3_3_0_a85.ufdb.txt"),
        *(f"pdict-v5-x-{PYTHON}.sqlite", f"pdict-v5-x-{PYTHON}.sqlite-wal", f"pdict-v4-x-py{DEAD}", "abc", "def"),
        *(f"pyopencl-compiler-cache-v2-py{PYTHON}", "new\nline", os.fsdecode(b"\xff"), "thesis.tex"),
    ]
)
#: What lies at the end of each branch; none of it is what any layer would take for its own.
THINGS = st.one_of(
    st.binary(min_size=1, max_size=40).map(lambda data: b"!" + data),
    st.sampled_from(["..", ".", "AB", "/", "nowhere", "../outside", "../../outside/AB", "lock"]),
    st.sampled_from([stat.S_IFIFO, stat.S_IFSOCK]),
)
TREES = st.recursive(THINGS, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4), max_leaves=14)
MAKERS = [maker for makers in RECOGNISED.values() for maker in makers]
DAMAGE = st.tuples(
    st.sampled_from(["cut", "empty", "flip", "more", "link", "folder", "pipe", "closed", "wal", "journal", "stranger"]),
    st.integers(0, 2**32),
)
VALUES = ["home", "base", "link", "home/..", "", "~", "~/x", ".", "relative", "new\nline", "/", "/dev/null", "x" * 300]


@dataclass(frozen=True)
class Case:
    """One random home, how it is damaged, and the variables under which it is looked at."""

    trees: Mapping[str, object]
    real: Sequence[tuple[str, Callable[[Path], Path]]]
    damage: Sequence[tuple[str, int]]
    variables: Mapping[str, str]
    platform: str


CASES = st.builds(
    Case,
    trees=st.dictionaries(st.sampled_from(BASES), st.dictionaries(NAMES, TREES, min_size=1, max_size=4), max_size=3),
    real=st.lists(st.tuples(st.sampled_from(BASES), st.sampled_from(MAKERS)), max_size=6),
    damage=st.lists(DAMAGE, max_size=4),
    variables=st.dictionaries(st.sampled_from([*PLACES, *WINDOWS_PLACES]), st.sampled_from(VALUES), max_size=6),
    platform=st.sampled_from(["linux", "linux", "darwin", "win32"]),
)
FIXED = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def grow(path: Path, content: object) -> None:
    """Make what hypothesis thought of, unless something is there."""
    if isinstance(content, dict):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
        for name, inner in content.items():
            grow(path / name, inner) if path.is_dir() and not path.is_symlink() else None
    elif not os.path.lexists(path):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, int):
            os.mknod(path, content | 0o600)
        else:
            path.symlink_to(str(content))


def spoil(path: Path, how: str, number: int, world: World) -> None:
    """Damage a file of an entry: its bytes, what stands in its place, or what lies beside it."""
    chance = random.Random(number)  # noqa: S311 - damage, repeatable
    if how in ("link", "folder", "pipe"):
        path.unlink()
        make = {"link": lambda: path.symlink_to(world.outside / "thesis.tex"), "folder": path.mkdir}
        make.get(how, lambda: os.mkfifo(path))()
    elif how == "closed":
        path.chmod(0)
    elif how in ("wal", "journal"):
        with contextlib.suppress(FileExistsError), open(f"{path}-{how}", "xb") as file:
            file.write(chance.randbytes(90))
    elif how == "stranger":
        write(path.with_name("thesis.tex"))
    else:
        path.write_bytes(_spoiled(path.read_bytes(), how, chance))


def _spoiled(content: bytes, how: str, chance: random.Random) -> bytes:
    if how == "cut":
        return content[: chance.randrange(len(content) + 1)]
    if how == "more":
        return content + chance.randbytes(50)
    flipped = bytearray(content if how == "flip" else b"")
    for _ in range(chance.randrange(1, 9) if flipped else 0):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def files_below(folder: Path) -> list[Path]:
    """List plain files of an entry, or the entry itself."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def spelled(value: str, world: World) -> str:
    """Return a random value of a variable."""
    known = {
        "home": world.home,
        "base": world.home / ".cache",
        "link": world.top / "link",
        "home/..": world.home / "..",
    }
    return str(known.get(value, value))


def reaches_out(stack: Stack, world: World) -> bool:
    """Tell whether a root is there that is not this world's: the tester's own are looked at, never cleared."""
    for layer in stack:
        for root in layer.roots():
            inside = Path(os.path.realpath(root.path)).is_relative_to(os.path.realpath(world.top))
            if not inside and os.path.lexists(root.path):
                return True
    return False


def planned_paths(planned: PurgePlan, world: World) -> list[bytes]:
    """Return where a plan may change something: its targets, files of rows whole, and what counts or locks them."""
    places = []
    for part in planned.plans:
        for target in part.targets:
            key = target.key.partition("::")[0]
            if ".sqlite" in key:
                key = key.partition("/")[0]
            place = os.fsencode(os.path.realpath(target.root / os.path.dirname(key)) + "/" + os.path.basename(key))
            places.append(place)
            if part.layer == "cuda":
                places.append(os.fsencode(os.path.realpath(target.root) + "/index"))
            if part.layer == "miopen-tuning":
                places.append(os.fsencode(os.path.realpath(target.root) + "/miopen-lockfiles"))
                places += [os.fsencode(world.empty / "tmp"), place + b".time"]
    return places


def is_planned(path: bytes, places: Sequence[bytes]) -> bool:
    """Tell whether a path is one of these, lies below one, is a database's companion, or a folder left empty above."""
    return any(
        path == place
        or path.startswith((place + b"/", place + b"-wal", place + b"-shm", place + b"-journal"))
        or (place.startswith(path + b"/") and not os.path.lexists(path))
        for place in places
    )


def strangers(world: World) -> set[bytes]:
    """Name the plain files that no layer has a name for, wherever they lie."""
    names = {b"thesis.tex", b"new\nline", b"\xff"}
    return {path for path in fingerprint(world.top) if os.path.basename(path) in names and _is_plain(path)}


def _is_plain(path: bytes) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)


def check(world: World, variables: Mapping[str, str], platform: str) -> int:
    """Do every verb over a world, and hold what changes against what was planned; return how many entries went."""
    stack = Stack(world.environment(variables, platform), plugins=False)
    start = fingerprint(world.top)
    assert all(is_json(said) for said in looked_at(stack))
    assert changed(start, fingerprint(world.top)) == set()
    if reaches_out(stack, world):
        event("a root outside: only looked at")
        return 0
    innocent = strangers(world)
    removed = 0
    plannings: tuple[Callable[[], PurgePlan], ...] = (
        lambda: plan_prune(stack.expendable(), Limits(stale=True)),
        stack.plan_clear,
        lambda: plan(stack.named(user_layers(stack)), ALL),
    )
    for planning in plannings:
        planned = planning()
        before = fingerprint(world.top)
        result = planned.apply()
        assert is_json(render.purge_json(result))
        differs = changed(before, fingerprint(world.top))
        places = planned_paths(planned, world)
        assert [path for path in differs if not is_planned(path, places)] == []
        assert differs & innocent == set()
        removed += sum(outcome.removed for outcome in result.outcomes)
    return removed


@settings(parent=FIXED, max_examples=70)
@given(case=CASES)
def test_nothing_unrecognised_changes_whatever_lies_wherever(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Random trees between real entries, damaged at random, under random variables.

    Looking changes nothing at all. Clearing changes what was planned, and nothing that was never an entry.
    No exception comes through, and all that is said can be written as JSON.
    """
    world = World(tmp_path_factory.mktemp("random"))
    (world.top / "link").symlink_to(world.home)
    for base, tree in case.trees.items():
        # A tree may have a file, a link or a pipe where the folder would go.
        with contextlib.suppress(OSError):
            grow(world.home / base, tree)
    made = []
    for base, make in case.real:
        with contextlib.suppress(OSError, sqlite3.Error):
            made.append(make(world.home / base))
    harm(made, case, world)
    removed = check_both_ways(world, case)
    event("entries went" if removed else "no entry went")


def harm(entries: Sequence[Path], case: Case, world: World) -> None:
    """Damage files of some entries, each once."""
    files = sorted({path for entry in entries for path in files_below(entry)})
    for how, number in case.damage:
        if files:
            spoil(files.pop(number % len(files)), how, number, world)


def check_both_ways(world: World, case: Case) -> int:
    """Check a case; where its variables reach out of its world, once more without those that do."""
    variables = {name: spelled(value, world) for name, value in case.variables.items()}
    removed = check(world, variables, case.platform)
    tame = {name: value for name, value in variables.items() if value not in ("/", "/dev/null")}
    return removed if removed or tame == variables else check(world, tame, case.platform)


@pytest.mark.hazard
@pytest.mark.real
@settings(parent=FIXED, max_examples=15)
@given(case=CASES)
def test_a_real_home_damaged_at_random_is_cleared_as_planned(
    tmp_path_factory: pytest.TempPathFactory, filled: Home, compute_cache: Callable[[Path], None], case: Case
) -> None:
    """What the real libraries wrote, cut short, flipped, swapped for links and pipes: the same promises hold."""
    world = World(tmp_path_factory.mktemp("real"))
    (world.top / "link").symlink_to(world.home)
    shutil.copytree(filled.path, world.home, symlinks=True, dirs_exist_ok=True)
    compute_cache(world.home / ".nv" / "ComputeCache")
    write(world.home / ".cache" / "pytools" / "thesis.tex")
    harm([world.home], case, world)
    removed = check_both_ways(world, replace(case, variables={**case.variables, "HOME": "home"}))
    event("entries went" if removed else "no entry went")


@settings(parent=FIXED, max_examples=8)
@given(case=CASES, verb=st.sampled_from([["report"], ["ls"], ["verify"], ["purge", "--all"], ["prune", "--stale"]]))
def test_the_real_command_over_random_homes(
    tmp_path_factory: pytest.TempPathFactory, case: Case, verb: list[str]
) -> None:
    """The command itself, in a process of its own: JSON, the due status, no traceback, and nobody's file changes."""
    world = World(tmp_path_factory.mktemp("command"))
    (world.top / "link").symlink_to(world.home)
    for base, tree in case.trees.items():
        with contextlib.suppress(OSError):
            grow(world.home / base, tree)
    for base, make in case.real:
        with contextlib.suppress(OSError, sqlite3.Error):
            harm([make(world.home / base)], case, world)
    # An account's own home stands behind a HOME that is no absolute folder: the tester's, here.
    variables = {
        name: spelled(value, world)
        for name, value in case.variables.items()
        if name not in ("HOME", "TMPDIR") or value in ("home", "base", "link")
    }
    assume(verb[0] not in ("purge", "prune") or not reaches_out(Stack(world.environment(variables)), world))
    innocent = strangers(world)
    before = fingerprint(world.top)
    world.run(*verb, *(["--wait", "0"] if len(verb) > 1 else []), **variables)
    differs = changed(before, fingerprint(world.top))
    assert differs & innocent == set()
    assert len(verb) > 1 or differs == set()
