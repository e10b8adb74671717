"""Damage made on caches that the real libraries filled: the program fails, quarantine mends, restore brings back."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tiers import thorough

from cachectl.clearing.quarantine import plan
from cachectl.inspecting.verify import findings
from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import Damaged, EntryExists
from cachectl.layers.base.facts import Entry, Finding, Quarantined
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.selection import Selection
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels, lookup
from cachectl.layers.stores.archive import pack, unpack
from cachectl.layers.stores.rows import RowFile
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def one(folder: Path, pattern: str) -> Path:
    return min(folder.rglob(pattern))


def empty_bitcode(home: Path) -> Path:
    path = one(home / ".cache" / "pocl", "lk0.so").parents[2] / "program.bc"
    path.write_bytes(b"")
    # What is compiled already needs no bitcode: a launch of another size does.
    for native in path.parent.rglob("*.so"):
        native.unlink()
    return path


def junk_native(home: Path) -> Path:
    path = one(home / ".cache" / "pocl", "lk0.so")
    path.write_bytes(b"no shared object at all")
    return path


def cut_info(home: Path) -> Path:
    path = one(home / ".cache" / "pyopencl", "info")
    path.write_bytes(path.read_bytes()[:20])
    return path


def cut_dictionary(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-loopy-schedule-cache*")
    path.write_bytes(path.read_bytes()[:3000])
    return path


def garbage_dictionary(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-pyopencl-invoker*")
    path.write_bytes(b"no database" * 1000)
    return path


def cut_rows(home: Path) -> Path:
    path = one(home / ".cache" / "pytools", "pdict-v5-loopy-code-gen*")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update dict set key_value = substr(key_value, 1, 40)")
    return path


@dataclass(frozen=True)
class Breakage:
    """One way in which a cache breaks: how it is made, in which layer it is found, which program meets it."""

    make: Callable[[Path], Path]
    layer: str
    program: tuple[str, ...]


BREAKAGES = {
    "empty program.bc": Breakage(empty_bitcode, "pocl", ("kernels.py", "8")),
    "junk .so": Breakage(junk_native, "pocl", ("kernels.py", "8")),
    "truncated info": Breakage(cut_info, "pyopencl", ("binaries.py", "3")),
    "truncated pdict": Breakage(cut_dictionary, "loopy", ("kernels.py", "8")),
    "garbage pdict": Breakage(garbage_dictionary, "pyopencl-invoker", ("kernels.py", "8")),
    "truncated rows": Breakage(cut_rows, "loopy", ("kernels.py", "8")),
}


def rest(folder: Path) -> None:
    """Let everything have been idle for an hour: beside whatever PoCL programs the tester runs, young entries stay."""
    then = time.time() - 3600
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))


def works(home: Home, program: tuple[str, ...]) -> bool:
    return home.run(sys.executable, str(home.programs / program[0]), *program[1:], check=False).returncode == 0


#: One of a folder and one of a database.
TRIED = ("truncated info", "truncated rows")


@pytest.mark.real
@pytest.mark.parametrize("name", [*TRIED, *thorough(*(name for name in BREAKAGES if name not in TRIED))])
def test_a_broken_cache_is_mended_and_broken_again(warm: Home, name: str) -> None:
    """The real program fails, verify names it, quarantine mends it, the program runs; restore brings it all back."""
    breakage = BREAKAGES[name]
    broken = breakage.make(warm.path)
    damaged = broken.read_bytes()
    assert not works(warm, breakage.program)
    found = warm.json("verify", check=False)["findings"]
    assert found
    assert {(finding["layer"], finding["severity"]) for finding in found} == {(breakage.layer, "fails every run")}
    rest(warm.path / ".cache" / "pocl")
    mended = warm.json("verify", "--quarantine")
    assert [part["layer"] for part in mended["quarantine"]] == [breakage.layer]
    assert mended["quarantine"][0]["moved"] == len({finding["key"] for finding in found})
    assert warm.cachectl("verify").stdout == "no damage found\n"
    assert works(warm, breakage.program)
    (first, *_) = listed = warm.json("restore")["quarantine"]
    assert {thing["layer"] for thing in listed} == {breakage.layer}
    refused = warm.cachectl("restore", first["name"], check=False)
    assert refused.returncode == 1
    assert "--replace" in refused.stderr
    warm.cachectl("restore", "--all", "--replace")
    assert warm.json("restore")["quarantine"] == []
    if broken.suffix != ".sqlite" or breakage.make is not cut_rows:
        assert broken.read_bytes() == damaged
    assert not works(warm, breakage.program)
    assert not list(warm.path.rglob(".cachectl-*"))


def test_a_malformed_user_database_hides_the_system_no_longer(home: Home) -> None:
    """A user's ``.ukdb`` that is no database makes MIOpen throw; moved aside, the good system entry is found."""
    environment = home.environment(MIOPEN_SYSTEM_DB_PATH=str(home.path / "system"))
    user, system = MIOpenKernels(environment), MIOpenSystemKernels(environment)
    code = b"\x7fELF" + b"code that came with MIOpen " * 100
    folder = home.path / "system"
    folder.mkdir()
    rows = RowFile("miopen", folder / "gfx90a6e.kdb", kernel_db.SCHEMA)
    rows.insert(("k.o", "args"), kernel_db.encode(code, kernel_db.SCHEMA), replace=False)
    broken = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"SQLite format 3\0" + b"malformed" * 500)
    with pytest.raises(Damaged):
        lookup(user, system, "gfx90a6e", "k.o", "args")
    done = home.cachectl("verify", "--quarantine", "--json", "miopen")
    assert json.loads(done.stdout)["quarantine"][0]["moved"] == 1
    answer = lookup(user, system, "gfx90a6e", "k.o", "args")
    assert answer is not None
    assert answer.data == code
    home.cachectl("restore", "--all")
    assert broken.read_bytes().endswith(b"malformed")


def test_a_damaged_row_of_miopen_is_moved_alone(home: Home) -> None:
    """The row that MIOpen would throw on goes aside; the others stay, and it comes back byte for byte."""
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    path.parent.mkdir(parents=True)
    rows = RowFile("miopen", path, kernel_db.SCHEMA)
    for name in ("good.o", "bad.o"):
        rows.insert((name, "args"), kernel_db.encode(b"\x7fELF" + name.encode(), kernel_db.SCHEMA), replace=False)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update kern_db set kernel_blob = x'00ff' where kernel_name = 'bad.o'")
    before = rows.read(("bad.o", "args"))
    home.cachectl("verify", "--quarantine", "miopen")
    assert rows.read(("bad.o", "args")) is None
    assert rows.read(("good.o", "args")) is not None
    home.cachectl("restore", "--all")
    assert rows.read(("bad.o", "args")) == before


def test_a_flipped_entry_and_a_garbage_index_of_cuda(home: Home, compute_cache: Callable[[Path], None]) -> None:
    """Both are moved aside, the index is made anew of what is left, and verify is content."""
    root = home.path / ".nv" / "ComputeCache"
    compute_cache(root)
    layer = Stack(home.environment())["cuda"]
    keys = [entry.key for entry in layer.entries()]
    data = bytearray((root / keys[0]).read_bytes())
    data[-1] ^= 1
    (root / keys[0]).write_bytes(data)
    (root / "index").write_bytes(b"garbage")
    home.cachectl("verify", "--quarantine", "cuda")
    assert home.cachectl("verify", "cuda").stdout == "no damage found\n"
    assert len(list(layer.entries())) == len(keys) - 1
    home.cachectl("restore", "--all", "--replace")
    assert (root / keys[0]).read_bytes() == data
    assert (root / "index").read_bytes() == b"garbage"


def test_lines_of_tuning_go_only_when_named(home: Home) -> None:
    """Results of tuning are precious: a malformed line is left, and said, until its layer is named."""
    folder = home.path / ".config" / "miopen"
    folder.mkdir(parents=True)
    path = folder / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    path.write_text("one=S:1,0,A\nno record\ntwo=S:1,0,A\none=S:9,0,A\nno other\n")
    spared = home.cachectl("verify", "--quarantine", check=False)
    assert spared.returncode == 1
    assert "only when their layer is named" in spared.stderr
    assert "no record" in path.read_text()
    home.cachectl("verify", "--quarantine", "miopen-tuning")
    assert path.read_text() == "one=S:1,0,A\ntwo=S:1,0,A\n"
    home.cachectl("restore", "--all")
    assert sorted(path.read_text().splitlines()) == [
        "no other",
        "no record",
        "one=S:1,0,A",
        "one=S:9,0,A",
        "two=S:1,0,A",
    ]


def test_records_that_miopen_reads_stay(home: Home) -> None:
    """MIOpen skips a value without an id and reads the others; nothing follows a semicolon at the end."""
    folder = home.path / ".config" / "miopen"
    folder.mkdir(parents=True)
    path = folder / "gfx90a6e.HIP.3_3_0_a85ca8a54.ufdb.txt"
    read = "k1=A:1,2,3;junk;B:4,5,6\n\nk2=A:1,2,3;\n"
    path.write_text(f"{read}k3=junk\nk3=A:1,2,3\nk4=A:1,2,3\nk4=A:9,9,9\n")
    listed = home.json("ls", "miopen-tuning")["entries"]
    assert [entry["key"].rpartition("::")[2] for entry in listed] == ["k1", "k2", "k4"]
    home.cachectl("verify", "--quarantine", "miopen-tuning")
    # The line that k3's first one hid is read from now on.
    assert path.read_text() == f"{read}k3=A:1,2,3\nk4=A:1,2,3\n"
    assert {finding["code"] for finding in home.json("verify", "miopen-tuning", check=False)["findings"]} == {"item"}
    # Nothing is to be said of a record that is listed and exported whole.
    assert home.cachectl("ls", "miopen-tuning").stderr == ""
    assert "not exported" not in home.cachectl("export", "tuning", "miopen-tuning").stderr
    home.cachectl("export", "--as-kdb", "db", "miopen-tuning")
    installed = (home.path / "db" / "gfx90a6e.HIP.fdb.txt").read_text()
    assert installed.splitlines() == [line for line in path.read_text().splitlines() if line]


def test_what_the_package_owns_is_never_moved(home: Home) -> None:
    """A damaged system database is named, refused with the reason, and the status says so."""
    folder = home.path / "system"
    folder.mkdir()
    path = folder / "gfx90a6e.kdb"
    path.write_bytes(b"SQLite format 3\0" + b"malformed" * 500)
    before = path.read_bytes()
    done = home.cachectl("verify", "--quarantine", check=False, MIOPEN_SYSTEM_DB_PATH=str(folder))
    assert done.returncode == 1
    assert "package manager" in done.stderr
    assert path.read_bytes() == before


@pytest.mark.real
def test_an_open_dictionary_is_not_moved(warm: Home) -> None:
    """A file that a program has open stays, the program is named, and the status is 1."""
    broken = cut_dictionary(warm.path)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()", str(broken)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    done = warm.cachectl("verify", "--quarantine", check=False)
    holder.communicate()
    assert done.returncode == 1
    assert f"is open in process {holder.pid} (" in done.stderr
    assert "), which must end first" in done.stderr
    assert broken.exists()
    assert not list(warm.path.rglob(".cachectl-*"))


@pytest.mark.real
def test_what_changed_meanwhile_is_left(warm: Home) -> None:
    """An entry that was mended between the plan and the move stays where it is."""
    broken = junk_native(warm.path)
    stack = Stack(warm.environment())
    planned = plan([stack["pocl"]], findings([stack["pocl"]]), named=False)
    broken.write_bytes(b"\x7fELF, and whole again")
    outcomes = planned.apply()
    assert [note.because for outcome in outcomes for note in outcome.skipped] == ["changed since it was planned"]
    assert broken.exists()


def test_unknown_names_and_misuse(home: Home) -> None:
    """A name that nothing has is one line and status 1; --all beside names is misuse."""
    missing = home.cachectl("restore", "20261121T000000Z-00000000", check=False)
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)
    assert home.cachectl("restore", "--all", "x", check=False).returncode == 2
    assert home.cachectl("restore").stdout == "nothing is in quarantine\n"


def spoiled(**changes: object) -> bytes:
    """Spell a label in which one thing is not what it should be."""
    label = {"schema": "cachectl/quarantined/1", "name": "20261121T000000Z-00000000", "layer": "pocl", "key": "k"}
    return json.dumps({**label, "bytes": 1, "moved": 1.0, "code": "c", "message": "m", **changes}).encode()


LABELS = {
    "empty": b"",
    "list": b"[]",
    "half": b"{",
    "schema": b'{"schema": 1}',
    "no text": b"\xff" * 10,
    "deep": b"[" * 100_000,
    "not a number": spoiled(moved=float("nan")),
    "huge": spoiled(bytes=10**400),
    "negative": spoiled(bytes=-5),
    "another name": spoiled(),
}


@pytest.mark.real
@pytest.mark.parametrize("content", LABELS.values(), ids=LABELS)
def test_a_label_that_is_none_is_told(warm: Home, content: bytes) -> None:
    """Whatever stands in a label, the others are listed, the folder is named, and clearing the layer clears it."""
    stack = Stack(warm.environment())
    junk_native(warm.path)
    cut_info(warm.path)
    quarantine_all(warm)
    (label,) = (warm.path / ".cache" / "pocl").rglob("label.json")
    label.write_bytes(content)
    listed = warm.run(sys.executable, "-m", "cachectl", "restore", "--json", check=False)
    assert listed.returncode == 1
    assert [thing["layer"] for thing in json.loads(listed.stdout)["quarantine"]] == ["pyopencl"]
    assert listed.stderr == f"cachectl: pocl: {label.parent}: has no label that could be read\n"
    stack["pocl"].clear(stack["pocl"].plan_clear())
    assert not label.parent.exists()


# ---------------------------------------------------------------------- SIGKILL


class Killer:
    """Runs something in a child that is killed at a random moment of the time it takes.

    How long that is, is learned as it goes: a machine is now faster, now slower, and moments that all lie before or
    behind the work would show nothing.
    """

    def __init__(self, seed: int, seconds: float) -> None:
        self.random = Random(seed)  # noqa: S311 - moments, not secrets
        self.seconds = seconds

    def kill(self, work: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(0)
        time.sleep(self.random.uniform(0, self.seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        self.seconds *= 1.06 if os.WIFSIGNALED(status) else 0.8


def settle(home: Home) -> None:
    """Open every dictionary as the next program would: sqlite rolls an interrupted write back."""
    for journal in home.path.rglob("*.sqlite-journal"):
        with closing(sqlite3.connect(str(journal).removesuffix("-journal"))) as connection:
            connection.execute("select count(*) from dict").fetchone()


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def present(layer: Layer, key: str) -> bytes | None:
    artifact = layer.get(key)
    return None if artifact is None else artifact.data


@pytest.mark.real
def test_put_killed_at_any_moment(warm: Home, moments: int) -> None:
    """A put that is killed leaves the old entry, the new one or none, and the real programs run."""
    stack = Stack(warm.environment())
    variants: dict[str, tuple[str, list[Any]]] = {}
    for name in ("pocl", "pyopencl", "loopy", "pyopencl-invoker"):
        layer = stack[name]
        entry = next(iter(layer.entries()))
        whole = layer.get(entry.key)
        assert whole is not None
        variants[name] = (entry.key, [whole, smaller(layer, whole)])

    def put_all(turn: int) -> None:
        for name, (key, artifacts) in variants.items():
            stack[name].put(key, artifacts[turn % 2], replace=True)

    killer = Killer(3, timed(lambda: put_all(1)))
    outcomes: set[tuple[str, bool]] = set()
    turns = 0
    # The moments are spread: every layer is met before and after its turn, however many kills that takes.
    while turns < moments or len(outcomes) < 2 * len(variants):
        assert turns < 20 * moments, outcomes
        turn, turns = turns, turns + 1
        killer.kill(lambda turn=turn: put_all(turn))  # type: ignore[misc]
        settle(warm)
        for name, (key, artifacts) in variants.items():
            data = present(stack[name], key)
            assert data is None or data in [artifact.data for artifact in artifacts]
            outcomes.add((name, data == artifacts[turn % 2].data))
        assert findings(stack) == []
        if turn % 20 == 9:
            assert works(warm, ("kernels.py", "8"))
            assert works(warm, ("binaries.py", "3"))
    assert works(warm, ("kernels.py", "8"))


def smaller(layer: Layer, whole: Any) -> Any:  # noqa: ANN401 - an artifact
    """Return another entry of the same key that the library can use as well."""
    if layer.name in ("pocl", "pyopencl"):
        spare = {"pocl": "last_accessed", "pyopencl": "source.cl"}[layer.name]
        members = {path: data for path, data in unpack(whole.data).items() if path != spare}
        return replace(whole, data=pack(members))
    return replace(whole, data=pickle.dumps(pickle.loads(whole.data), protocol=4))  # noqa: S301 - made by this test


@pytest.mark.real
def test_quarantine_killed_at_any_moment(filled: Home, tmp_path: Path, moments: int) -> None:
    """A move into quarantine that is killed leaves the thing in its place or wholly aside, never half."""
    broken = tmp_path / "broken"
    shutil.copytree(filled.path, broken, symlinks=True)
    for breakage in ("truncated info", "truncated pdict", "truncated rows", "junk .so"):
        BREAKAGES[breakage].make(broken)
    damage = {finding.key for finding in found_in(home_at(filled, broken))}
    work = tmp_path / "work"

    def fresh() -> Home:
        shutil.rmtree(work / "home", ignore_errors=True)
        shutil.copytree(broken, work / "home", symlinks=True)
        return home_at(filled, work / "home")

    first = fresh()
    killer = Killer(4, timed(lambda: quarantine_all(first)))
    seen: set[int] = set()
    turns = 0
    # The moments are spread: it is met with nothing aside, with everything, and with a part.
    while turns < moments or len(seen) < 3:
        assert turns < 20 * moments, seen
        turn, turns = turns, turns + 1
        home = fresh()
        killer.kill(lambda home=home: quarantine_all(home))  # type: ignore[misc]
        settle(home)
        left = {finding.key for finding in found_in(home)}
        aside = {thing.key for layer in Stack(home.environment()) for thing in held(layer)}
        # A row is copied before it is deleted, so that it may be in both places, never in none.
        assert left | aside == damage
        assert all("/" in (key or "") for key in left & aside)
        seen.add(len(aside))
        quarantine_all(home)
        assert found_in(home) == []
        if turn % 20 == 9:
            assert works(home, ("kernels.py", "8"))
            assert works(home, ("binaries.py", "3"))


def home_at(home: Home, path: Path) -> Home:
    return replace(home, path=path, variables={**home.variables, "HOME": str(path)})


def found_in(home: Home) -> list[Finding]:
    return findings(Stack(home.environment()))


def quarantine_all(home: Home) -> None:
    stack = Stack(home.environment())
    plan(list(stack), findings(stack), named=False).apply()


@pytest.mark.real
def test_restore_over_another_entry_is_asked_for(warm: Home) -> None:
    """From Python: what stands in the place is not replaced unless asked, and both sides are whole meanwhile."""
    broken = junk_native(warm.path)
    stack = Stack(warm.environment())
    layer = stack["pocl"]
    quarantine_all(warm)
    (thing,) = held(layer)
    artifact = other_entry(layer)
    shutil.copytree(artifact.root / artifact.key, artifact.root / thing.key)
    before = snapshot(warm.path)
    with pytest.raises(EntryExists):
        layer.restore(thing)
    assert snapshot(warm.path) == before
    layer.restore(thing, replace=True)
    assert broken.read_bytes() == b"no shared object at all"
    assert list(layer.quarantined()) == []


def held(layer: Layer) -> list[Quarantined]:
    return [thing for thing in layer.quarantined() if isinstance(thing, Quarantined)]


def other_entry(layer: Layer) -> Entry:
    return next(iter(layer.entries(Selection())))


# ---------------------------------------------------------------------- found by reviews


HOLDER = """
import fcntl, os, sqlite3, subprocess, sys
import cachectl
database, index = sys.argv[1:]
connection = sqlite3.connect(database, isolation_level=None)
connection.execute("begin immediate")
handle = os.open(index, os.O_RDWR)
fcntl.lockf(handle, fcntl.LOCK_EX)
stack = cachectl.Stack()
stack.report()
for name in ("loopy", "cuda"):
    for root in stack[name].roots():
        list(stack[name].verify(root))
    list(stack[name].entries())
other = '''
import fcntl, os, sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("begin immediate")
    print("database")
except sqlite3.OperationalError: pass
try:
    fcntl.lockf(os.open(sys.argv[2], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("index")
except OSError: pass
'''
print(subprocess.run([sys.executable, "-c", other, database, index], capture_output=True, text=True).stdout.split())
"""


@pytest.mark.real
def test_looking_drops_no_lock_of_this_process(warm: Home, compute_cache: Callable[[Path], None]) -> None:
    """POSIX drops a process's locks on a file when it closes any descriptor of it: ours must not be that one."""
    root = warm.path / ".nv" / "ComputeCache"
    compute_cache(root)
    database = one(warm.path / ".cache" / "pytools", "pdict-v5-loopy-code-gen*.sqlite")
    done = warm.run(sys.executable, "-c", HOLDER, str(database), str(root / "index"))
    assert done.stdout == "[]\n"


def damaged_database(home: Home) -> Path:
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"SQLite format 3\0" + b"malformed" * 500)
    return path


def good_database(path: Path) -> Path:
    rows = RowFile("miopen", path, kernel_db.SCHEMA)
    rows.insert(("k.o", "args"), kernel_db.encode(b"\x7fELF", kernel_db.SCHEMA), replace=False)
    return path


def test_a_database_that_was_mended_meanwhile_goes_back(home: Home, tmp_path: Path) -> None:
    """The finding is old, the file under its name is whole by now: it stays, whatever its mark."""
    path = damaged_database(home)
    stack = Stack(home.environment())
    layer = stack["miopen"]
    (finding,) = findings([layer])
    good_database(tmp_path / "good")
    shutil.copyfile(tmp_path / "good", path)
    status = path.stat()
    assert finding.thing is not None
    fresh = replace(finding, thing=replace(finding.thing, mark=(status.st_ino, status.st_size, status.st_mtime_ns)))
    outcome = layer.quarantine(layer.plan_quarantine([fresh]), [fresh])
    assert [note.because for note in outcome.skipped] == ["changed since it was planned"]
    assert path.read_bytes() == (tmp_path / "good").read_bytes()
    assert held(layer) == []
    assert not list(home.path.rglob(".cachectl-*"))


def test_a_folder_with_the_name_of_a_journal_is_nobodys(home: Home) -> None:
    """Neither quarantine nor restore touches it."""
    path = damaged_database(home)
    layer = Stack(home.environment())["miopen"]
    found = findings([layer])
    stranger = Path(f"{path}-wal") / "thesis.txt"
    stranger.parent.mkdir()
    stranger.write_text("years of work")
    layer.quarantine(layer.plan_quarantine(found), found)
    assert stranger.read_text() == "years of work"
    (thing,) = held(layer)
    layer.restore(thing)
    assert stranger.read_text() == "years of work"
    assert path.exists()


def test_a_restore_that_fails_puts_the_newer_one_back(home: Home) -> None:
    """What stood in the place stands there again, and what was in quarantine is there still."""
    path = damaged_database(home)
    layer = Stack(home.environment())["miopen"]
    found = findings([layer])
    layer.quarantine(layer.plan_quarantine(found), found)
    (thing,) = held(layer)
    before = good_database(path).read_bytes()

    class Stubborn(RowFile):
        def _journals(self, folder: int) -> list[str]:
            # A journal that is listed but has gone: the exchange fails in its midst.
            return [*super()._journals(folder), "vanished"] if "label.json" in os.listdir(folder) else []

    with pytest.raises(OSError, match="No such file"):
        Stubborn("miopen", path, kernel_db.SCHEMA).bring_file_back(thing, replace=True)
    assert path.read_bytes() == before
    assert held(layer) == [thing]


def test_a_row_that_cannot_go_leaves_nothing_in_quarantine(home: Home) -> None:
    """The database is locked: no copy piles up with each try."""
    path = home.path / ".cache" / "miopen" / "3.3.0.a85ca8a54" / "gfx90a6e.ukdb"
    good_database(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update kern_db set kernel_blob = x'00ff'")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        done = home.cachectl("verify", "--quarantine", "miopen", "--wait", "0.1", check=False)
    assert done.returncode == 1
    assert "locked by another process" in done.stderr
    assert home.json("restore")["quarantine"] == []
    assert not list(home.path.rglob(".cachectl-*"))


@pytest.mark.real
def test_what_is_no_entry_is_not_restored(warm: Home, tmp_path: Path) -> None:
    """Somebody has put a link, or a file of his own, where the entry lay: it stays where it is."""
    junk_native(warm.path)
    quarantine_all(warm)
    layer = Stack(warm.environment())["pocl"]
    (thing,) = held(layer)
    (label,) = (warm.path / ".cache" / "pocl").rglob("label.json")
    entry = label.parent / thing.key.split("/")[1]
    shutil.move(entry, tmp_path / "entry")
    entry.symlink_to(tmp_path / "entry")
    with pytest.raises(Damaged, match="is no entry"):
        layer.restore(thing)
    entry.unlink()
    entry.mkdir()
    (entry / "thesis.txt").write_text("years of work")
    with pytest.raises(Damaged, match="is no entry"):
        layer.restore(thing)
    assert (entry / "thesis.txt").exists()


def test_a_folder_that_others_can_write_to_is_not_believed(home: Home) -> None:
    """Whoever may write into a quarantine folder could choose what is restored: it is told, and left."""
    path = damaged_database(home)
    home.cachectl("verify", "--quarantine", "miopen")
    (label,) = home.path.rglob("label.json")
    label.parent.chmod(0o777)
    done = home.cachectl("restore", "--all", check=False)
    assert done.returncode == 1
    assert "others may write to it" in done.stderr
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a folder away")
def test_a_folder_of_another_user_is_not_believed(home: Home) -> None:
    """In a shared root anybody could plant a row for our own database."""
    damaged_database(home)
    home.cachectl("verify", "--quarantine", "miopen")
    (label,) = home.path.rglob("label.json")
    os.chown(label.parent, 30001, 30001)
    done = home.cachectl("restore", "--all", check=False)
    assert "was put there by another user" in done.stderr
    home.cachectl("purge", "miopen")
    assert label.exists()
