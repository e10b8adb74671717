"""Random homes, variables and damage: no command changes what is not a cache entry."""

import contextlib
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from homes import Home, unpack_compute_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile
from support.hostile import DEAD, HEX32, NAME37, PYTHON, World, changed, hash_tree
from tiers import amount, real

from cachectl.config import Limits
from cachectl.removal import RemovalPlan
from cachectl.stack import Stack
from cachectl.verbs.prune import plan_prune

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
MAKERS = [maker for makers in hostile.RECOGNISED.values() for maker in makers]
DAMAGE = st.tuples(
    st.sampled_from(["cut", "empty", "flip", "more", "link", "folder", "pipe", "closed", "wal", "journal", "stranger"]),
    st.integers(0, 2**32),
)
VALUES = ["home", "base", "link", "home/..", "", "~", "~/x", ".", "relative", "new\nline", "/", "/dev/null", "x" * 300]


class Case(NamedTuple):
    """One random home, how it is damaged, and the variables under which it is looked at."""

    trees: Mapping[str, object]
    real: Sequence[tuple[str, Callable[[Path], Path]]]
    damage: Sequence[tuple[str, int]]
    variables: Mapping[str, str]
    platform: str


CASES = st.builds(
    Case,
    trees=st.dictionaries(
        st.sampled_from(hostile.BASES), st.dictionaries(NAMES, TREES, min_size=1, max_size=4), max_size=3
    ),
    real=st.lists(st.tuples(st.sampled_from(hostile.BASES), st.sampled_from(MAKERS)), max_size=6),
    damage=st.lists(DAMAGE, max_size=4),
    variables=st.dictionaries(
        st.sampled_from([*hostile.PLACES, *hostile.WINDOWS_PLACES]), st.sampled_from(VALUES), max_size=6
    ),
    platform=st.sampled_from(["linux", "linux", "darwin", "win32"]),
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
        # A random tree may have a folder or a pipe of that name.
        if not os.path.lexists(stranger := path.with_name("thesis.tex")):
            hostile.write(stranger)
    else:
        content = bytearray(path.read_bytes())
        if how == "more":
            content += chance.randbytes(50)
        elif how == "cut":
            del content[chance.randrange(len(content) + 1) :]
        elif how == "empty":
            content.clear()
        for _ in range(chance.randrange(1, 9) if how == "flip" and content else 0):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def reaches_out(stack: Stack, world: World) -> bool:
    """Return whether a root exists outside this world: the tester's own are read, never cleared."""
    paths = [Path(os.path.realpath(root.path)) for layer in stack for root in layer.roots()]
    return any(os.path.lexists(path) and not path.is_relative_to(os.path.realpath(world.top)) for path in paths)


def planned_paths(planned: RemovalPlan, world: World) -> list[bytes]:
    """Return where a plan may change something: its targets, files of rows whole, and what counts or locks them."""
    places = []
    for part in planned.layers:
        for target in part.entries:
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
    """Return whether a path is one of these or below one, a companion of a database, or an emptied folder above."""
    return any(
        path == place
        or path.startswith((place + b"/", place + b"-wal", place + b"-shm", place + b"-journal"))
        or (place.startswith(path + b"/") and not os.path.lexists(path))
        for place in places
    )


def check(world: World, variables: Mapping[str, str], platform: str) -> int:
    """Do every verb over a world, and hold what changes against what was planned; return how many entries went."""
    stack = Stack(world.environment(variables, platform))
    start = hash_tree(world.top)
    hostile.look(stack)
    assert changed(start, hash_tree(world.top)) == set()
    if reaches_out(stack, world):
        return 0
    # Plain files that no layer has a name for, wherever they lie.
    strange = {b"thesis.tex", b"new\nline", b"\xff"}
    innocent = {path for path in start if os.path.basename(path) in strange and hostile.is_plain(path)}
    removed = 0
    plannings: tuple[Callable[[], RemovalPlan], ...] = (
        lambda: plan_prune(stack.clearable(), Limits(stale=True), lambda _: None),
        stack.plan_clear,
        lambda: stack.plan_clear(layers=hostile.user_layers(stack)),
    )
    for planning in plannings:
        planned = planning()
        before = hash_tree(world.top)
        removed += hostile.applied(planned)
        differs = changed(before, hash_tree(world.top))
        places = planned_paths(planned, world)
        assert [path for path in differs if not is_planned(path, places)] == []
        assert differs & innocent == set()
    return removed


@settings(max_examples=amount(12, 70))
@given(case=CASES)
def test_nothing_unrecognised_changes_whatever_lies_wherever(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Random trees between real entries, damaged at random, under random variables.

    Looking changes nothing at all. Clearing changes what was planned, and nothing that was never an entry.
    No exception comes through, and all that is said can be written as JSON.
    """
    world = World(tmp_path_factory.mktemp("random"))
    for base, tree in case.trees.items():
        # A tree may have a file, a link or a pipe where the folder would go.
        with contextlib.suppress(OSError):
            grow(world.home / base, tree)
    made = []
    for base, make in case.real:
        with contextlib.suppress(OSError, sqlite3.Error):
            made.append(make(world.home / base))
    check_damaged(made, case, world)


@pytest.mark.hazard
@real
@settings(max_examples=15)
@given(case=CASES)
def test_a_real_home_damaged_at_random_is_cleared_as_planned(
    tmp_path_factory: pytest.TempPathFactory, filled: Home, case: Case
) -> None:
    """The same promises hold for real entries that are cut short, flipped, or replaced by links and pipes."""
    world = World(tmp_path_factory.mktemp("real"))
    shutil.copytree(filled.path, world.home, symlinks=True, dirs_exist_ok=True)
    unpack_compute_cache(world.home / ".nv/ComputeCache")
    hostile.write(world.home / ".cache/pytools/thesis.tex")
    check_damaged([world.home], case._replace(variables={**case.variables, "HOME": "home"}), world)


def check_damaged(entries: Sequence[Path], case: Case, world: World) -> None:
    """Damage entries and check a case; where its variables reach out of its world, once more without those that do."""
    (world.top / "link").symlink_to(world.home)
    files = sorted({path for entry in entries for path in (entry, *entry.rglob("*")) if path.is_file()})
    files = [path for path in files if not path.is_symlink()]
    for how, number in case.damage:
        if files:
            spoil(files.pop(number % len(files)), how, number, world)
    known = {"home": "home", "base": "home/.cache", "link": "link", "home/..": "home/.."}
    variables = {
        name: str(world.top / known[value]) if value in known else value for name, value in case.variables.items()
    }
    removed = check(world, variables, case.platform)
    tame = {name: value for name, value in variables.items() if value not in ("/", "/dev/null")}
    if not removed and tame != variables:
        check(world, tame, case.platform)
