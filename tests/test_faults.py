"""Commands in which a call on the home fails, or kills them: counts stay true, and nothing unreadable passes for gone.

The rules are those of ``tests/faults/sweep.py``. By default one call is tried under a few faults for each command. With
``CACHECTL_HAZARD=N`` every command meets all faults, at every Nth call; ``CACHECTL_HAZARD=1`` tries them all.
"""

import errno
import fcntl
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from homes import run_in
from injector import KILL, READS, WRITES, Fault, Injector
from support.bundles import files
from support.dictionaries import FILE, dictionary, equal_rows
from sweep import CASES, FAULTS, Sweep, put_cases
from tiers import thorough, thorough_only
from worlds import WORLDS, World, filled_world

#: Each how many calls; ``None`` for one call.
EVERY = int(os.environ["CACHECTL_HAZARD"]) if os.environ.get("CACHECTL_HAZARD") else None
FEW_FAULTS = (
    (WRITES, errno.EIO, False),
    (WRITES, errno.ENOSPC, True),
    (WRITES, KILL, False),
    (READS, errno.EIO, False),
    (READS, errno.EACCES, True),
)
FEW = {
    "filled": ("report", "ls", "verify", "purge", "pull", "purge-damaged"),
    "synthetic": ("report", "ls", "doctor", "purge", "prune", "purge-damaged", "push"),
    "mesa-single-file": ("ls", "purge", "purge-key"),
    "mesa-database": ("report", "purge-key"),
}
#: Those that the default run tries.
ALWAYS = (("mesa-single-file", "ls"),)
ALL = dict.fromkeys(("filled", *WORLDS), (*CASES, "put"))
Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    @cache
    def make(name: str) -> World:
        folder = tmp_path_factory.mktemp(name)
        return WORLDS[name](folder) if name != "filled" else filled_world(folder, request.getfixturevalue(name).path)

    return make


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=() if (name, verb) in ALWAYS else pytest.mark.hazard)
        for name, verbs in (FEW if EVERY is None else ALL).items()
        for verb in verbs
    ],
)
def test_no_fault_makes_a_command_lie(name: str, verb: str, injector: Injector, worlds: Worlds, tmp_path: Path) -> None:
    world = worlds(name)
    cases = put_cases(world) if verb == "put" else (CASES[verb],)
    faults = FEW_FAULTS if EVERY is None else FAULTS
    sweep = Sweep(injector, world, tmp_path)
    broken = [complaint for case in cases for complaint in sweep.case(case, faults, EVERY)]
    assert not broken, "\n".join(broken[:10])


# ---------------------------------------------------------------------- what cannot be read is unknown, not gone


def cachectl(home: Path, line: str, by: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run a command over a home; return its status, output and errors."""
    done = run_in(home, *line.split(), by=by)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    mode = folder.stat().st_mode
    folder.chmod(0)
    try:
        yield
    finally:
        folder.chmod(mode)


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    return WORLDS["synthetic"](tmp_path).path


def test_the_numbers_of_a_root_that_cannot_be_read_are_unknown(synthetic: Path, held_to_modes: tuple[str, ...]) -> None:
    root = synthetic / ".cache/comgr"
    with closed(root):
        status, out, _ = cachectl(synthetic, "report comgr neo --json", held_to_modes)
        _, table, _ = cachectl(synthetic, "report comgr neo", held_to_modes)
        alone = json.loads(cachectl(synthetic, "report comgr --json", held_to_modes)[1])["total"]
    said = json.loads(out)
    comgr, neo = said["layers"]
    (root,) = comgr["roots"]
    assert (status, comgr["complete"], neo["complete"]) == (1, False, True)
    assert [part[number] for part in (comgr, root) for number in ("entries", "files", "bytes")] == [None] * 6
    assert (root["orphan_bytes"], root["problems"][0]["code"]) == (None, "unreadable")
    unknown = {
        "complete": False,
        **dict.fromkeys(("stale_entries", "stale_bytes", "orphan_bytes", "unknown_files")),
        "stale_unknown": 0,
    }
    assert said["total"] == {number: neo[number] for number in ("entries", "files", "bytes")} | unknown
    assert alone == {"entries": None, "files": None, "bytes": None, **unknown}
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert (lines["comgr"][2:5], lines["total"][1]) == (["-", "-", "-"], f"{neo['entries']}+")


def test_what_lies_in_a_closed_folder_is_unknown_and_not_gone(synthetic: Path, held_to_modes: tuple[str, ...]) -> None:
    """Numbers are lower bounds, ``get`` says that it could not read, and an unreadable entry is no damaged one."""
    root = synthetic / ".cache/neo_compiler_cache"
    entry = next((root / "9").rglob("*_cache"))
    with closed(root / "9"):
        status, out, _ = cachectl(synthetic, "report neo --json", held_to_modes)
        _, table, _ = cachectl(synthetic, "report neo", held_to_modes)
        got, _, said = cachectl(synthetic, f"get neo {entry.relative_to(root)}", held_to_modes)
    (neo,) = json.loads(out)["layers"]
    assert (status, neo["entries"], neo["complete"]) == (1, 7, False)
    assert ("7+" in table, "lower bound" in table) == (True, True)
    assert (got, said.startswith("cachectl: neo: cannot read: Permission denied")) == (1, True)
    with closed(entry):
        cachectl(synthetic, "purge neo --damaged", held_to_modes)
    assert entry.exists()


def test_a_purge_names_a_cut_database_that_it_cannot_clear(synthetic: Path) -> None:
    file = synthetic / ".cache/miopen/3.2.0.x/gfx906_60.ukdb"
    os.truncate(file, file.stat().st_size // 2)
    status, out, _ = cachectl(synthetic, "purge miopen --json")
    (said,) = json.loads(out)["layers"]
    (note,) = said["failed"]
    assert (status, said["removed"], note["key"]) == (1, 3, str(file))
    assert "malformed" in note["because"]
    assert [cachectl(synthetic, f"{verb} miopen")[0] for verb in ("report", "ls")] == [1, 1]


@pytest.mark.parametrize("verb", ["verify", "doctor"])
def test_verify_and_doctor_find_a_dictionary_folder_that_cannot_be_listed(
    verb: str, tmp_path: Path, held_to_modes: tuple[str, ...]
) -> None:
    folder = tmp_path / ".cache/pytools"
    folder.mkdir(parents=True)
    layers = ("loopy", "pytools", "pyopencl-invoker")
    with closed(folder):
        status, out, _ = cachectl(tmp_path, f"{verb} {' '.join(layers)} --json", held_to_modes)
    unread = [one for one in json.loads(out)["findings"] if one["code"] == "unreadable"]
    found = {(layer, one["root"]) for one in unread for layer in one.get("layers", [one["layer"]])}
    assert (status, found) == (1, {(layer, str(folder)) for layer in layers})


@thorough_only
@pytest.mark.parametrize("sticky", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("layer", ["pytools", *thorough("miopen")])
def test_no_read_error_removes_a_good_database(layer: str, sticky: bool, injector: Injector, synthetic: Path) -> None:
    """Sqlite calls a page that it could not read damage. EIO meets one read, or every read from one on."""
    root = synthetic / ".cache" / layer
    if layer == "pytools":
        dictionary(root / FILE, equal_rows(50, pickle.dumps(("key", "x" * 500))))
    before = files(root)
    assert any(content.startswith(b"SQLite format 3") for content in before.values())
    command = ("purge", layer, "--damaged")
    counted = injector.run(*command, home=synthetic, fault=Fault(READS))
    assert (counted.status, files(root)) == (0, before)
    for nth in range(1, counted.seen + 1, EVERY or 4):
        ended = injector.run(*command, home=synthetic, fault=Fault(READS, nth, errno.EIO, sticky))
        assert ("Traceback" in ended.stderr, files(root)) == (False, before), ended.where


def test_the_next_command_removes_what_a_killed_one_left_beside_its_file(synthetic: Path, injector: Injector) -> None:
    key = min(entry.key for entry in World(synthetic).stack(synthetic).entries(layers=["comgr"]))
    command = ("get", "comgr", key, "-o", str(synthetic / "file"))
    killed = injector.run(*command, home=synthetic, fault=Fault(WRITES, 3, KILL))
    assert killed.status == -9
    (left,) = synthetic.glob(".cachectl-stage-*")
    # A command that still writes there keeps its own.
    with left.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert injector.run(*command, home=synthetic, fault=Fault(0)).status == 0
        assert list(synthetic.glob(".cachectl-stage-*")) == [left]
    assert injector.run(*command, home=synthetic, fault=Fault(0)).status == 0
    assert not list(synthetic.glob(".cachectl-stage-*"))
    assert (synthetic / "file").exists()
