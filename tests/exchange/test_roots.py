"""Isolated roots of ranks, and database files of MIOpen, as sources and targets."""

import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from homes import CACHECTL, Home, make_home
from support.bundles import TRUSTED
from support.layers import environment_of, got
from support.miopen_kernels import ARGS, CODE, FIND, add_kernels, kernels_in, packed, store, stored, user_file
from support.tracing import numbers
from tiers import thorough_only

from cachectl.exchange.trust import Untrusted
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.cuda import CudaComputeCache
from cachectl.layers.miopen import MIOpenSystemKernels
from cachectl.layers.miopen.databases import SEPARATOR
from cachectl.layers.miopen.kernels import join_kernel_key
from cachectl.stack import Stack


def stack_of(home: Path) -> Stack:
    """Return the layers of a home with a folder for temporary files."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    return Stack(environment_of(home))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home with ``rank0``, kept by run, and ``rank1``, an XDG_CACHE_HOME: other programs in each."""
    home = make_home(tmp_path_factory.mktemp("ranks") / "home")
    program = f"{home.programs}/thirteen.py"
    home.cachectl("run --isolated=rank0 --", sys.executable, program, "2", "0")
    home.python("thirteen.py 1 1", XDG_CACHE_HOME=f"{home.path}/rank1")
    return home


@thorough_only
@pytest.mark.real
def test_all_programs_of_all_ranks_are_warm_in_one_root(ranks: Home, tmp_path: Path) -> None:
    shutil.copytree(ranks.path, tmp_path / "home", symlinks=True)
    home = make_home(tmp_path / "home")
    before = snapshot(home.path / "rank0"), snapshot(home.path / "rank1")
    (home.path / "all").mkdir()
    document = home.json("pull rank0 rank1 --root=all")
    (pocl,) = (layer for layer in document["layers"] if layer["layer"] == "pocl")
    # Two loopy kernels in the one; one of them, and a plain program, in the other.
    assert (pocl["placed"], pocl["there"], document["total"]["failed"]) == (3, 1, 0)
    assert home.json("pull rank0 rank1 --root=all")["total"]["placed"] == 0
    assert (snapshot(home.path / "rank0"), snapshot(home.path / "rank1")) == before

    programs = sorted((home.path / "all").rglob("program.bc"))
    trace = (*CACHECTL, "trace", "--json", "trace.json", "--", sys.executable, f"{home.programs}/thirteen.py")
    home.cachectl("run --isolated=all --", *trace, "2", "1")
    traced = json.loads((home.path / "trace.json").read_text())
    assert [numbers(traced, name)[1] for name in ("loopy", "pocl")] == [0, 0]
    assert sorted((home.path / "all").rglob("program.bc")) == programs


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3)])
def test_a_layer_that_fails_to_name_its_roots_stops_no_other(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(_: object) -> None:
        raise error

    other = make_home(tmp_path / "other")
    add_kernels(other, range(2))
    monkeypatch.setattr(CudaComputeCache, "roots", fails)
    assert home.stack.pull(str(other.path)).total.placed == 2


def test_only_roots_that_no_other_user_can_write_are_trusted(home: Home, open_folder: Path) -> None:
    root = open_folder / "root"
    home.cachectl(f"run --isolated={root} -- true")
    add_kernels(home, range(2))
    stack = home.stack
    Stack.below(str(root), home.environment()).pull(str(home.path))
    (file,) = root.rglob("*.ukdb")
    for path in (root, *(path for path in file.parents if root in path.parents)):
        path.chmod(0o755)
    assert stack.pull(root, dry_run=True).total.there == 2
    for path, mode, words in (
        (root, 0o777, "another user can write it"),
        *((path, mode, f"other users can write to {path}") for path, mode in ((file.parent, 0o777), (file, 0o666))),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(Untrusted, match=words):
            stack.pull(root)
        pulled = stack.pull(root, TRUSTED)
        assert (pulled.total.there, pulled.trusted) == (2, ("because of --trust",))
        path.chmod(before)


def test_a_root_has_no_entries_of_the_machine(home: Home, tmp_path: Path) -> None:
    rank = make_home(tmp_path / "rank")
    add_kernels(rank, [1])
    (file,) = rank.path.rglob("*.ukdb")
    # Where MIOpen keeps kernels if the home is on a network file system.
    fallback = home.path / "tmp/.cache/miopen" / file.parent.name / "gfx908.ukdb"
    fallback.parent.mkdir(parents=True)
    shutil.copy(file, fallback)
    stack = Stack(home.environment(TMPDIR=str(home.path / "tmp")))
    assert [entry.root for entry in stack.entries()] == [home.path / "tmp/.cache/miopen"]
    done = stack.pull(str(rank.path), dry_run=True)
    assert (done.total.placed, done.total.there) == (1, 0)


def test_a_database_in_use_becomes_a_file_to_install(tmp_path: Path) -> None:
    home = tmp_path / "home"
    raw = b"\x7fELF raw"
    kernels = {("conv.cl.o", ARGS): packed(CODE), ("wino.s.o", ARGS): packed(raw)}
    path = store(user_file(home), kernels, wal=True)
    target = tmp_path / "db/gfx90a6e.kdb"
    target.parent.mkdir()
    before = snapshot(home / ".cache")
    done = stack_of(home).push(target)
    assert snapshot(home / ".cache") == before
    assert (done.total.placed, done.total.failed, done.digest) == (2, 0, None)
    assert stored(target) == [(*names, *values) for names, values in kernels.items()]
    # Rollback mode: others than its owner can open it, where they may not write next to it.
    assert target.read_bytes()[18:20] == b"\x01\x01"
    installed = environment_of(tmp_path / "another", MIOPEN_SYSTEM_DB_PATH=str(target.parent))
    system = MIOpenSystemKernels(installed)
    assert list(system.store.verify(system.roots()[0])) == []
    assert got(system, SEPARATOR.join((target.name, join_kernel_key(("conv.cl.o", ARGS))))).data == CODE
    # It is completed, and nothing in it is replaced.
    store(path, {("conv.cl.o", ARGS): packed(raw), ("new.cl.o", ARGS): packed(CODE)})
    assert stack_of(home).push(str(target)).total.placed == 1
    assert stored(target)[0] == ("conv.cl.o", ARGS, *packed(CODE))


def test_a_database_that_a_program_has_open_is_not_replaced(home: Home, tmp_path: Path) -> None:
    add_kernels(home, [1])
    file = tmp_path / "gfx90a6e.kdb"
    shutil.copy(next(home.path.rglob("*.ukdb")), file)
    add_kernels(home, [2])
    with closing(sqlite3.connect(file)) as program:
        # Its log would be applied to whatever lies in the place of the file.
        program.execute("pragma journal_mode=wal")
        program.execute("delete from kern_db")
        program.commit()
        before = file.read_bytes()
        home.refused(f"push {file} miopen", says="end the program, or push to a new FILE")
        assert file.read_bytes() == before
    home.cachectl(f"push {file} miopen")
    (home.path / "tmp").mkdir(exist_ok=True)
    assert home.stack.pull(str(file), TRUSTED).total.there == 2


def test_databases_of_ranks_are_pulled(home: Home, tmp_path: Path, open_folder: Path) -> None:
    files = []
    for number in range(2):
        rank = make_home(tmp_path / f"home{number}")
        add_kernels(rank, range(number, number + 2))
        (made,) = rank.path.rglob("*.ukdb")
        files.append(open_folder / f"rank{number}" / made.name)
        files[-1].parent.mkdir()
        shutil.copy(made, files[-1])
    with pytest.raises(BadRequest, match="named after the version of MIOpen"):
        home.stack.pull(files[0])
    add_kernels(home, [9])
    done = home.json("pull", *map(str, files))
    assert (done["total"]["placed"], done["total"]["there"]) == (3, 1)
    assert len(kernels_in(home)) == 4
    files[0].parent.chmod(0o777)
    home.refused(f"pull {files[0]}", says="another user can write it")


def test_results_of_tuning_become_a_file_and_come_back(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    lines = b"1-2-3=A:1\n4-5-6=B:2\n"
    path = home / ".config/miopen" / FIND
    path.parent.mkdir(parents=True)
    path.write_bytes(lines)
    file = tmp_path / FIND
    stack_of(home).push(file, layers=["miopen-tuning"])
    assert sorted(file.read_bytes().splitlines()) == sorted(lines.splitlines())
    assert stack_of(other).pull(file).total.placed == 2
