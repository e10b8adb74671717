"""Homes full of deceptive files: no command changes what is not a cache entry."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from support import hostile
from support.hostile import DEAD, HEX32, NAME37, PYTHON, THESIS, World, changed, hash_tree, write
from tiers import thorough

from cachectl.config import Limits
from cachectl.stack import Stack
from cachectl.verbs.prune import plan_prune

#: Names that come near to those of some layer, or have one that holds something else.
INNOCENT = (
    "pdict-v5-loopy-notes.sqlite",
    f"pdict-v5-mine-{DEAD}.sqlite.bak",
    f"pdict-v5-alone-{DEAD}.sqlite-journal",
    f"pdict-v6-mine-{DEAD}.sqlite",
    f"pdict-v4-mine-py{DEAD}/notes.txt",
    f"pdict-v4-mine-py{DEAD}/abc/def/0123456789ab/thesis.txt",
    f"pdict-v4-mine-py{DEAD}/abc/def/012345678/contents",
    f"pdict-v2-mine-py{DEAD}/0123456789abcdef/thesis.txt",
    "pdict-v4-mine/abc/def/0123456789ab/contents",
    f"pyopencl-compiler-cache-v2-py{DEAD}/lock",
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32}/thesis.tex",
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32}/binary",
    f"pyopencl-compiler-cache-v2-py{DEAD}/{HEX32[1:]}/binary",
    f"pyopencl-compiler-cache-v2-py/{HEX32}/binary",
    f"AB/{NAME37}/program.bc",
    f"AB/{NAME37}/thesis.tex",
    f"AB/{NAME37[1:]}/program.bc",
    f"AB/{NAME37}A/program.bc",
    f"QZ/{NAME37}/program.bc",
    f"ab/{NAME37}/program.bc",
    f"BA/{NAME37}/program.bc/thesis.tex",
    "program.bc",
    "last_accessed",
    "tempfile_A1b2c3",
    "tempfile_A1b2c4.cl",
    "_UNCACHED_A1b2c3/thesis.tex",
    "_UNCACHED_thesis/program.bc",
    "a/b/0123456789abcd",
    "a/b/0123456789abc",
    "a/b/0123456789abcde",
    "a/index",
    "index",
    f"3.3.0.a85/{HEX32}/notes.o",
    f"{HEX32}/thesis.o",
    "gfx90a6e.HIP.3_3_0_a85.ufdb.txt",
    f".cachectl-stage-{HEX32[1:]}/thesis.tex",
    ".cachectl-trash-notes/thesis.tex",
    "lock",
    "new\nline",
    os.fsdecode(b"\xff\xfe"),
    "-rf",
    f"JK/{NAME37}/{'d/' * 40}thesis.tex",
)
#: And such that hold something else than somebody's work.
DECEPTIVE: Mapping[str, bytes] = {
    **dict.fromkeys(INNOCENT, THESIS),
    f"pdict-v5-loopy-mine-{PYTHON}.sqlite": THESIS * 9,
    f"pdict-v5-loopy-empty-{PYTHON}.sqlite": b"",
    f"pdict-v5-mine-{DEAD}.sqlite": THESIS * 9,
    "tempfile_abcdef": b"",
    "gfx90a6e.ukdb": THESIS * 9,
    "3.3.0.a85/gfx90a6e.ukdb": THESIS * 9,
    f"{HEX32[1:]}/thesis.o": hostile.CODE,
    "gfx90a6e.HIP.3_3_0_a85.ufdb.txt.bak": b"a=b:c\n",
    "gfx90a6e.udb": THESIS * 9,
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
        hostile.database(folder / name, script)
    for name in PRIVATE:
        (folder / name).chmod(0o700 if (folder / name).is_dir() else 0o600)
    if role in ("kcache", "uncached"):
        # There, and only there, what is named like a temporary is PoCL's own, also where a word was drawn.
        (folder / "tempfile_abcdef").unlink()
        shutil.rmtree(folder / "_UNCACHED_thesis")
    else:
        write(folder / "tempdir_A1b2c3/thesis.tex")
        (folder / "tempdir_A1b2c3").chmod(0o700)


def still_holds(path: Path) -> bool:
    """Return whether an entry exists; of a database, whether any row does."""
    if path.suffix not in (".sqlite", ".ukdb"):
        return os.path.lexists(path)
    with closing(sqlite3.connect(path)) as connection:
        table = "dict" if path.suffix == ".sqlite" else "kern_db"
        return bool(connection.execute(f"select count(*) from {table}").fetchone()[0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a home of more than a thousand innocent files and every kind of link, which no test may change."""
    world = World(tmp_path_factory.mktemp("hostile"))
    for make in (maker for makers in hostile.RECOGNISED.values() for maker in makers):
        make(world.outside)
    (world.outside / "AB").mkdir()
    shutil.copytree(world.outside / "HG" / NAME37, world.outside / "AB" / NAME37)
    shutil.copytree(world.outside / "1.8.0", world.outside / "3.3.0")
    for base in hostile.BASES:
        settle(world.home / base, Path(base).name)
        hostile.link(world.home / base, world.outside)
    (world.top / "link").symlink_to(world.home)
    kinds = [os.lstat(path).st_mode for path in hash_tree(world.home)]
    assert sum(map(stat.S_ISREG, kinds)) > 1000
    assert sum(map(stat.S_ISLNK, kinds)) > 8 * len(hostile.BASES)
    assert sum(map(stat.S_ISFIFO, kinds)) == sum(map(stat.S_ISSOCK, kinds)) > len(hostile.BASES)
    return world


def all_at_once(value: Path | str) -> dict[str, str]:
    return dict.fromkeys((*hostile.PLACES, *hostile.WINDOWS_PLACES), str(value))


@pytest.mark.parametrize(
    ("platform", "variable"),
    [
        *(("linux", variable) for variable in ("all", "all, through a link")),
        ("darwin", "HOME"),
        ("win32", "all"),
        *thorough(
            *(("linux", variable) for variable in hostile.PLACES),
            ("darwin", "XDG_CACHE_HOME"),
            *(("win32", variable) for variable in hostile.WINDOWS_PLACES),
        ),
    ],
)
def test_every_variable_in_turn_costs_nobody_anything(world: World, platform: str, variable: str) -> None:
    """A variable that points at a home: looking, purging and pruning leave all of it, and all it links to, as it was.

    Purged are also the precious layers, which ``--all`` leaves out.
    """
    place = world.top / "link" if variable == "all, through a link" else world.home
    variables = all_at_once(place) if variable.startswith("all") else {variable: str(place)}
    stack = Stack(world.environment(variables, platform))
    before = hash_tree(world.home, world.outside, world.empty)
    hostile.look(stack)
    if variable == "all" and platform == "linux":
        # The traps were looked at, and seen for what they are.
        for name in ("pytools", "loopy", "pyopencl", "pocl", "cuda", "miopen"):
            assert any(root.usage.problems for root in stack.report(layers=[name]).layers[0].roots)
    for planned in (
        stack.plan_clear(layers=hostile.user_layers(stack)),
        stack.plan_clear(),
        plan_prune(stack.clearable(), Limits(stale=True), lambda _: None),
        plan_prune(stack.clearable(), Limits(max_size=0)),
    ):
        assert hostile.applied(planned) == 0
    assert changed(before, hash_tree(world.home, world.outside, world.empty)) == set()


@pytest.mark.parametrize("layer", hostile.RECOGNISED)
def test_recognised_entries_are_removed_from_among_other_files(tmp_path: Path, layer: str) -> None:
    """In the same kind of folder real entries are found and removed: it is not blindness that spares the others."""
    world = World(tmp_path)
    variables = {"POCL_CACHE_DIR": "pocl", "MIOPEN_CUSTOM_CACHE_DIR": "miopen", "MIOPEN_USER_DB_PATH": "miopen-tuning"}
    places = {name: str(world.home / place) for name, place in variables.items()}
    root = world.home / layer
    settle(root, "")
    before = hash_tree(root)
    made = [make(root) for make in hostile.RECOGNISED[layer]]
    stack = Stack(world.environment({"XDG_CACHE_HOME": str(world.home), **places}))
    assert hostile.applied(stack.plan_clear(layers=[layer])) >= 1
    assert [path for path in made if still_holds(path)] == []
    after = hash_tree(root)
    assert {path: after.get(path) for path in before} == before


def test_an_old_file_called_lock_that_pyopencl_did_not_make_stays(tmp_path: Path) -> None:
    """PyOpenCL's lock is an empty file: one with words in it, or a link, is somebody's, however old it is."""
    world = World(tmp_path)
    entry = hostile.put_binary(world.home / "pyopencl")
    lock = entry.parent / "lock"
    stack = Stack(world.environment({"XDG_CACHE_HOME": str(world.home)}))
    for linked in (False, True):
        lock.symlink_to(world.outside / "thesis.tex") if linked else write(lock)
        os.utime(lock, (1, 1), follow_symlinks=False)
        before = hash_tree(world.home, world.outside)
        (outcome,) = stack.plan_clear(layers=["pyopencl"]).apply().layers
        assert "see cachectl doctor" in outcome.failed[0].because
        assert changed(before, hash_tree(world.home, world.outside)) == set()
        lock.unlink()
