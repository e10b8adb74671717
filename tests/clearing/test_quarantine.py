"""Quarantine: damage is moved aside, the real programs run, and restore brings it back."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.quarantine import (
    BREAKAGES,
    cut_dictionary,
    cut_info,
    cut_rows,
    junk_native,
    quarantine_all,
    works,
)
from tiers import thorough

from cachectl.clearing.quarantine import plan
from cachectl.inspecting.verify import findings
from cachectl.layers.base.errors import Damaged
from cachectl.layers.miopen import kernel_db
from cachectl.layers.miopen.kernels import MIOpenKernels
from cachectl.layers.miopen.system_kernels import MIOpenSystemKernels, lookup
from cachectl.layers.stores.rows import RowFile
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def rest(folder: Path) -> None:
    """Let everything have been idle for an hour: beside whatever PoCL programs the tester runs, young entries stay."""
    then = time.time() - 3600
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))


#: The one that needs most parts of quarantine.
TRIED = "truncated rows"


@pytest.mark.real
@pytest.mark.parametrize("name", [TRIED, *thorough(*(name for name in BREAKAGES if name != TRIED))])
def test_a_broken_cache_is_fixed_and_broken_again(warm: Home, name: str) -> None:
    """The real program fails, verify names it, quarantine fixes it, the program runs; restore restores everything."""
    breakage = BREAKAGES[name]
    broken = breakage.make(warm.path)
    damaged = broken.read_bytes()
    assert not works(warm, breakage.program)
    found = warm.json("verify", check=False)["findings"]
    assert found
    assert {(finding["layer"], finding["severity"]) for finding in found} == {(breakage.layer, "fails every run")}
    rest(warm.path / ".cache" / "pocl")
    fixed = warm.json("verify", "--quarantine")
    assert [part["layer"] for part in fixed["quarantine"]] == [breakage.layer]
    assert fixed["quarantine"][0]["moved"] == len({finding["key"] for finding in found})
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
    """Both are moved aside, the index is rewritten for the remaining entries, and verify finds nothing."""
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
    assert "not pushed" not in home.cachectl("push", "tuning.zip", "miopen-tuning").stderr
    home.cachectl("push", "gfx90a6e.HIP.fdb.txt", "miopen-tuning")
    installed = (home.path / "gfx90a6e.HIP.fdb.txt").read_text()
    assert sorted(installed.splitlines()) == sorted(line for line in path.read_text().splitlines() if line)


def test_files_of_a_package_are_never_moved(home: Home) -> None:
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
def test_entries_changed_meanwhile_are_left(warm: Home) -> None:
    """An entry that was fixed between the plan and the move stays where it is."""
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
    """Return a label in which one thing is wrong."""
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
@pytest.mark.parametrize("name", ["half", *thorough(*(name for name in LABELS if name != "half"))])
def test_a_bad_label_is_reported(warm: Home, name: str) -> None:
    """A bad label hides no other: the folder is named, the rest is listed, and clearing the layer clears it."""
    stack = Stack(warm.environment())
    junk_native(warm.path)
    cut_info(warm.path)
    quarantine_all(warm)
    (label,) = (warm.path / ".cache" / "pocl").rglob("label.json")
    label.write_bytes(LABELS[name])
    listed = warm.run(sys.executable, "-m", "cachectl", "restore", "--json", check=False)
    assert listed.returncode == 1
    assert [thing["layer"] for thing in json.loads(listed.stdout)["quarantine"]] == ["pyopencl"]
    assert listed.stderr == f"cachectl: pocl: {label.parent}: has no readable label\n"
    stack["pocl"].clear(stack["pocl"].plan_clear())
    assert not label.parent.exists()
