"""Full disks, read-only folders and locks: one line for each cause, and nothing lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from homes import run_as
from support.trouble import environment
from tiers import thorough

from cachectl.layers.base.conformance import snapshot
from cachectl.layers.base.errors import LayerError
from cachectl.layers.base.facts import Artifact
from cachectl.layers.base.selection import ALL
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home
#: Layers that the filled home has entries of.
LAYERS = ("loopy", "pyopencl-invoker", "pyopencl", "pocl", "cuda")
CLEARING = [PURGE, PRUNE] = [("purge", "--all"), ("prune", "--max-size", "1B")]
HOUR = 3600


def age(folder: Path) -> None:
    """Make everything old, so that no program of the tester's can be busy with it."""
    then = time.time() - 2 * HOUR
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture
def settle(filled: Home, compute_cache: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a way to give a home what loopy, PyOpenCL, PoCL and CUDA left in others."""

    def fill(home: Path) -> None:
        shutil.copytree(filled.path / ".cache", home / ".cache", symlinks=True)
        compute_cache(home / ".nv" / "ComputeCache")
        age(home)

    return fill


def fill_up(disk: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def run(home: Path, *arguments: str, by: Sequence[str] = ()) -> tuple[int, Counter[str], str]:
    """Run the command over a home; return its status, how many lines each layer got, and the lines."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = run_as(by, arguments, {**kept, "HOME": str(home), "TMPDIR": str(home)})
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("cachectl: ") for line in lines), done.stderr
    return done.returncode, Counter(line.split(": ")[1] for line in lines), done.stderr


def holding(home: Path, aside: Path) -> set[str]:
    """Name the layers that have entries."""
    stack = Stack(environment(home, aside), plugins=False)
    return {entry.layer for entry in stack.entries(ALL, notice=lambda _: None)}


def assert_no_leftovers(home: Path) -> None:
    """No stage, trash, journal or lock of ours lies about."""
    names = [path.name for path in home.rglob("*")]
    assert [
        name for name in names if name.startswith(".cachectl-") or name.endswith("-journal") or name == "lock"
    ] == []


# ---------------------------------------------------------------------- no room


@pytest.mark.real
@pytest.mark.parametrize("verb", CLEARING)
def test_a_full_disk_is_cleared(
    disk: Path, settle: Callable[[Path], None], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    """A disk with no free byte: every layer is cleared, and the room can be used again."""
    settle(disk)
    fill_up(disk)
    assert run(disk, *verb)[:2] == (0, {})
    assert holding(disk, tmp_path / "aside") == set()
    assert_no_leftovers(disk)
    (disk / "new").write_bytes(bytes(1 << 20))


def put_records(home: Path) -> None:
    """Add a result of tuning."""
    folder = home / ".config" / "miopen"
    folder.mkdir(parents=True)
    (folder / "gfx90a6e.HIP.3_3_0_a85.ufdb.txt").write_text("1x1=S:0.5,0,A\n" + f"2x2=T:{'7' * 4090}\n")


def spoil(artifact: Artifact, root: Path) -> None:
    """Put something else in the place of an entry, that a put would replace."""
    file, _, digest = artifact.key.partition("/")
    if file.endswith(".sqlite"):
        with closing(sqlite3.connect(root / file)) as connection, connection:
            connection.execute("update dict set key_value = ? where keyhash = ?", (b"N.", digest))
    elif "::" in artifact.key:
        path = root / artifact.key.partition("::")[0]
        path.write_text(path.read_text().replace("0.5,0,A", "0.6,0,B"))
    else:
        path = root / artifact.key
        changed = path if path.is_file() else next(file for file in sorted(path.rglob("*")) if file.is_file())
        changed.write_bytes(changed.read_bytes() + b"!")


@pytest.mark.real
@pytest.mark.parametrize("layer", [*LAYERS, "miopen-tuning"])
@pytest.mark.parametrize(
    "standing", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["another stands", "none stands"]
)
def test_a_put_without_room_leaves_what_was(
    disk: Path, settle: Callable[[Path], None], tmp_path: Path, layer: str, *, standing: bool
) -> None:
    """A put on a full disk ends in one error of the layer, and leaves the old entry, or none: never half of one."""
    settle(disk)
    put_records(disk)
    stack = Stack(environment(disk, tmp_path / "aside"), plugins=False)
    entry = max(stack.entries(ALL, layers=[layer]), key=lambda entry: (entry.key.count("::"), entry.bytes))
    artifact = stack[layer].get(entry.key)
    assert artifact is not None
    if layer == "miopen-tuning":
        artifact = replace(artifact, data=artifact.data + b"8" * 9000)
    if standing:
        spoil(artifact, entry.root)
    else:
        shutil.rmtree(entry.root)
        entry.root.mkdir()
    filler = fill_up(disk)
    before = plain(disk)
    with pytest.raises(LayerError) as failure:
        stack[layer].put(artifact.key, artifact, replace=True)
    assert "\n" not in str(failure.value)
    assert "No space left" in str(failure.value) or "disk is full" in str(failure.value)
    # CUDA's index is counted again, also after a put that fails: it no longer lists what was spoiled.
    index = ".nv/ComputeCache/index"
    assert {**plain(disk), index: ""} == {**before, index: ""}
    filler.unlink()
    stack[layer].put(artifact.key, artifact, replace=True)
    assert stack[layer].get(artifact.key) == artifact
    assert_no_leftovers(disk)


def plain(folder: Path) -> dict[str, str]:
    """Describe every file but empty ones, which locks are: a folder alone is no entry."""
    nothing = snapshot_of(b"")
    return {path: what for path, what in snapshot(folder).items() if what not in ("folder", nothing)}


def snapshot_of(content: bytes) -> str:
    """Return what a snapshot says of a file with this content."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_bytes(content)
        return snapshot(Path(folder))["file"]


@pytest.mark.real
def test_the_command_says_in_one_line_that_a_put_found_no_room(
    disk: Path, settle: Callable[[Path], None], tmp_path: Path
) -> None:
    """``cachectl put`` on a full disk: status 1, one line that names layer, reason and place."""
    settle(disk)
    key = next(Stack(environment(disk, tmp_path / "aside"), plugins=False).entries(ALL, layers=["cuda"])).key
    file = tmp_path / "artifact"
    assert run(disk, "get", "cuda", key, "-o", str(file))[0] == 0
    assert run(disk, "purge", "cuda", "--key", key)[0] == 0
    fill_up(disk)
    before = plain(disk)
    status, lines, said = run(disk, "put", "cuda", key, str(file))
    assert (status, lines) == (1, {"cuda": 1})
    assert "No space left on device" in said
    assert key in said
    assert plain(disk) == before


# ---------------------------------------------------------------------- no leave to write


@pytest.mark.real
@pytest.mark.parametrize("verb", CLEARING)
def test_a_read_only_disk_is_one_line_for_each_layer(
    disk: Path, mount: Callable[..., Path], settle: Callable[[Path], None], verb: tuple[str, ...]
) -> None:
    """On a disk that cannot be written to every layer with entries says so, once, and every byte stays."""
    settle(disk)
    before = snapshot(disk, times=True)
    mount("-o", "remount,ro", on=disk)
    status, lines, said = run(disk, *verb)
    assert (status, lines) == (1, dict.fromkeys(LAYERS, 1)), said
    assert all("ead-only" in line or "readonly" in line for line in said.splitlines())
    assert snapshot(disk, times=True) == before


@pytest.mark.real
@pytest.mark.parametrize("verb", [PURGE, *thorough((PRUNE,))])
@pytest.mark.parametrize(
    "closed",
    [
        (".cache/pocl", "pocl"),
        *thorough(((".nv/ComputeCache", "cuda"),), ((".cache/pyopencl", "pyopencl"),)),
    ],
)
def test_one_read_only_root_stops_no_other_layer(
    mount: Callable[..., Path],
    settle: Callable[[Path], None],
    tmp_path: Path,
    closed: tuple[str, str],
    verb: tuple[str, ...],
) -> None:
    """One root on a read-only mount: its layer is named once and keeps everything, all the others are cleared."""
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    folder, failing = closed
    place = home / folder
    mount("--bind", str(place), on=place)
    mount("-o", "remount,ro,bind", on=place)
    before = snapshot(place, times=True)
    status, lines, said = run(home, *verb)
    assert (status, lines) == (1, {failing: 1}), said
    assert snapshot(place, times=True) == before
    assert holding(home, tmp_path / "aside") == {failing}
    assert_no_leftovers(home)


@pytest.mark.real
@pytest.mark.parametrize("layer", LAYERS)
def test_a_put_on_a_read_only_disk_is_an_error_of_its_layer(
    disk: Path, mount: Callable[..., Path], settle: Callable[[Path], None], tmp_path: Path, layer: str
) -> None:
    """Where nothing can be written, a put raises the layer's own error and changes nothing."""
    settle(disk)
    stack = Stack(environment(disk, tmp_path / "aside"), plugins=False)
    entry = next(stack.entries(ALL, layers=[layer]))
    artifact = stack[layer].get(entry.key)
    assert artifact is not None
    spoil(artifact, entry.root)
    before = snapshot(disk, times=True)
    mount("-o", "remount,ro", on=disk)
    with pytest.raises(LayerError, match=r"ead-only|readonly"):
        stack[layer].put(artifact.key, artifact, replace=True)
    assert snapshot(disk, times=True) == before


@pytest.mark.real
@pytest.mark.parametrize("layer", ["pocl", *thorough("cuda", "pyopencl")])
@pytest.mark.parametrize("verb", [PURGE, *thorough((PRUNE,))])
def test_a_closed_sub_folder_is_reported_and_the_rest_is_done(
    settle: Callable[[Path], None], tmp_path: Path, held_to_modes: tuple[str, ...], layer: str, verb: tuple[str, ...]
) -> None:
    """A folder inside a root that this user cannot read: it is named, and nothing else is held up by it."""
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    root = {"cuda": ".nv/ComputeCache", "pocl": ".cache/pocl/kcache", "pyopencl": ".cache/pyopencl"}[layer]
    inner = next(path for path in sorted((home / root).iterdir()) if path.is_dir())
    inner.chmod(0)
    (line,) = [line for line in run(home, "ls", by=held_to_modes)[2].splitlines() if "Permission denied" in line]
    assert f"{layer}: {inner}: cannot be read" in line
    status, lines, said = run(home, *verb, by=held_to_modes)
    inner.chmod(0o700)
    assert (status, lines) == (1, {layer: 1}), said
    assert f"{layer}: {inner}: cannot be read: Permission denied" in said
    assert holding(home, tmp_path / "aside") == {layer}


@pytest.mark.real
@pytest.mark.parametrize("verb", CLEARING)
def test_a_root_that_may_be_read_but_not_changed_is_one_line(
    settle: Callable[[Path], None], tmp_path: Path, held_to_modes: tuple[str, ...], verb: tuple[str, ...]
) -> None:
    """A folder whose mode forbids changes: one line for its layer, the others are done."""
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    base = next((home / ".cache" / "pyopencl").iterdir())
    base.chmod(0o500)
    before = snapshot(base)
    status, lines, said = run(home, *verb, by=held_to_modes)
    assert (status, lines) == (1, {"pyopencl": 1}), said
    assert "Permission denied" in said
    assert snapshot(base) == before
    assert holding(home, tmp_path / "aside") == {"pyopencl"}


# ---------------------------------------------------------------------- a lock that somebody holds


@contextmanager
def locked(files: Sequence[Path], how: str) -> Iterator[None]:
    """Hold sqlite's lock on files."""
    with ExitStack() as stack:
        for file in files:
            connection = stack.enter_context(closing(sqlite3.connect(file, isolation_level=None)))
            connection.execute(f"begin {how}")
        yield


@pytest.mark.real
@pytest.mark.parametrize("how", ["immediate", *thorough("exclusive")])
@pytest.mark.parametrize("verb", [PURGE, *thorough((PRUNE,))])
def test_a_lock_that_another_process_holds_costs_one_line(
    settle: Callable[[Path], None], tmp_path: Path, how: str, verb: tuple[str, ...]
) -> None:
    """While a program writes its dictionaries they stay, with one line that names them; everything else goes."""
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    files = sorted((home / ".cache" / "pytools").glob("pdict-v5-loopy-*"))
    before = {file: file.read_bytes() for file in files}
    with locked(files, how):
        status, lines, said = run(home, *verb, "--wait", "0.1")
    assert (status, lines) == (1, {"loopy": 1}), said
    assert "locked by another process for more than 0.1 s" in said
    assert "pdict-v5-loopy-" in said
    assert {file: file.read_bytes() for file in files} == before
    assert holding(home, tmp_path / "aside") == {"loopy"}
    assert run(home, *verb)[:2] == (0, {})
    assert holding(home, tmp_path / "aside") == set()


@pytest.mark.real
def test_a_put_into_a_locked_dictionary_is_one_line(settle: Callable[[Path], None], tmp_path: Path) -> None:
    """``put --wait`` gives up when it said it would, and leaves the dictionary as it was."""
    home = tmp_path / "home"
    home.mkdir()
    settle(home)
    entry = next(Stack(environment(home, tmp_path / "aside"), plugins=False).entries(ALL, layers=["loopy"]))
    artifact = tmp_path / "artifact"
    assert run(home, "get", "loopy", entry.key, "-o", str(artifact))[0] == 0
    file = entry.root / entry.key.partition("/")[0]
    before = file.read_bytes()
    with locked([file], "immediate"):
        status, lines, said = run(home, "put", "loopy", entry.key, str(artifact), "--wait", "0.1")
    assert (status, lines) == (1, {"loopy": 1})
    assert "locked by another process for more than 0.1 s" in said
    assert str(file) in said
    assert file.read_bytes() == before
