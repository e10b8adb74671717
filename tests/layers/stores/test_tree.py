"""The folder-tree store: what it may touch, and what not, whatever is in its way."""

import contextlib
import errno
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layers import limited, on_disk, python, running, write
from tiers import amount

from cachectl.layers.base.errors import EntryExists, LayerError, Unreachable
from cachectl.layers.core.conformance import snapshot
from cachectl.layers.core.entry import Entry, Note, Problem
from cachectl.layers.core.plan import Outcome
from cachectl.layers.disk.locks import presence_lock
from cachectl.layers.host.here import this_environment
from cachectl.layers.stores.tree_read import OWN_TEMPORARY, Leaf, Shape, Tree
from cachectl.layers.stores.tree_remove import remove_things
from cachectl.layers.stores.tree_write import write_entries

SHAPE = Shape((re.compile("[a-f]{2}"), re.compile("[0-9]{4}")), folders=True)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree("test", tmp_path / "root", SHAPE)


def fill(tree: Tree, key: str = "ab/0001", **files: bytes) -> Path:
    folder = tree.root / key
    folder.mkdir(parents=True)
    for name, content in (files or {"file": b"content"}).items():
        (folder / name).write_bytes(content)
    return folder


def entries(tree: Tree, *, unknown: bool = False) -> list[Entry]:
    leaves = (leaf for leaf in tree.scan() if isinstance(leaf, Leaf) and not leaf.shape.sums)
    return [leaf.entry for leaf in leaves if leaf.entry.is_unknown is unknown]


def keys(tree: Tree, *, unknown: bool = False) -> list[str]:
    return [entry.key for entry in entries(tree, unknown=unknown)]


def problems(tree: Tree) -> dict[str, str]:
    return {problem.path.name: problem.code for problem in tree.scan() if isinstance(problem, Problem)}


def clear(tree: Tree) -> Outcome:
    return remove_things(tree, entries(tree))


def test_links_are_listed_as_problems_and_never_followed(tree: Tree, tmp_path: Path) -> None:
    outside = tmp_path / "outside/0001"
    write(outside / "file", "precious")
    fill(tree)
    for name, target in (("cd", outside.parent), ("ab/0002", outside), ("ab/0003", "0003"), ("ab/0001/inner", outside)):
        (tree.root / name).symlink_to(target)
    assert keys(tree) == ["ab/0001"]
    assert problems(tree) == dict.fromkeys(("0002", "0003", "cd"), "link")
    assert clear(tree).removed == 1
    assert (outside / "file").read_text() == "precious"
    assert (tree.root / "cd").is_symlink()
    # A root that is a link is resolved once.
    linked = Tree("test", tmp_path / "link", SHAPE)
    linked.root.symlink_to(tree.root)
    fill(tree, "ef/0001")
    assert clear(linked).removed == 1


def test_an_entry_with_a_link_or_a_pipe_is_left_alone(tmp_path: Path) -> None:
    tree = Tree("test", tmp_path / "root", SHAPE._replace(members=re.compile("file|other")))
    fill(tree, "ab/0001").joinpath("other").symlink_to("file")
    os.mkfifo(fill(tree, "ab/0002") / "other")
    fill(tree, "ab/0003")
    assert keys(tree, unknown=True) == ["ab/0001", "ab/0002"]
    assert (keys(tree), clear(tree).removed) == (["ab/0003"], 1)
    left = {str(path.relative_to(tree.root / "ab")) for path in (tree.root / "ab").rglob("*")}
    assert left == {"0001", "0001/file", "0001/other", "0002", "0002/file", "0002/other"}


def test_a_folder_swapped_for_a_link_after_the_plan_does_no_harm(tree: Tree, tmp_path: Path) -> None:
    fill(tree)
    planned = entries(tree)
    outside = tmp_path / "outside"
    (tree.root / "ab").rename(outside)
    (tree.root / "ab").symlink_to(outside)
    outcome = remove_things(tree, planned)
    assert (outcome.removed, len(outcome.skipped)) == (0, 1)
    assert (outside / "0001/file").exists()


def test_files_left_by_an_interrupted_removal_are_cleared_later(tree: Tree) -> None:
    write(tree.root / f".cachectl-trash-{'0' * 32}/0/file", "half removed")
    (entry,) = entries(tree)
    assert entry.is_orphan
    during = set[str]()

    def tidy() -> bool:
        during.update(os.listdir(tree.root))
        return True

    remove_things(tree, [entry], tidy=tidy)
    # It was not moved into another trash folder, deeper with each failed deletion.
    assert not during
    fill(tree)
    outcome = remove_things(tree, entries(tree), tidy=tidy)
    assert (outcome.removed, outcome.failed) == (1, ())
    assert os.listdir(tree.root) == []
    # A kill would now leave the same name.
    assert [name.startswith(".cachectl-trash-") for name in during - {"ab"}] == [True]


def place(tree: Tree, key: str, members: Mapping[str, bytes], *, replace: bool = False) -> None:
    """Place one entry as a store does, and raise its error."""
    (result,) = write_entries(tree, {key: members}, replace=replace).values()
    if isinstance(result, LayerError):
        raise result


def test_write_replaces_only_when_asked(tree: Tree) -> None:
    first, other = {"one": b"1", "sub/two": b"2"}, {"one": b"other"}
    place(tree, "ab/0001", first)
    with pytest.raises(EntryExists):
        place(tree, "ab/0001", other)
    assert tree.read_members("ab/0001") == first
    place(tree, "ab/0001", other, replace=True)
    assert tree.read_members("ab/0001") == other
    assert os.listdir(tree.root) == ["ab"]


NAMES = st.sampled_from(
    ["ab", "0001", "0002", "file", "cd", f".cachectl-trash-{'1' * 32}", "xy", "a b", "é", "\udcff", "new\nline"]
)
TREES = st.recursive(
    st.one_of(st.binary(max_size=3), st.sampled_from(["..", "ab", "/nowhere"])),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def build(folder: Path, content: object) -> None:
    if isinstance(content, dict):
        folder.mkdir()
        for name, inner in content.items():
            build(folder / name, inner)
    elif isinstance(content, bytes):
        folder.write_bytes(content)
    else:
        folder.symlink_to(str(content))


@settings(max_examples=amount(40, 150))
@given(content=st.dictionaries(NAMES, TREES, max_size=5))
def test_only_leaves_of_the_shape_ever_go(tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]) -> None:
    tree = Tree("test", tmp_path_factory.mktemp("tree") / "root", SHAPE)
    build(tree.root, content)
    before = snapshot(tree.root)
    own = keys(tree)
    assert all(SHAPE.accepts(key) or key.startswith(".cachectl-trash-") for key in own)
    assert clear(tree).failed == ()
    assert snapshot(tree.root) == {
        path: what for path, what in before.items() if not any(f"{path}/".startswith(f"{key}/") for key in own)
    }


def test_the_stage_of_a_running_cachectl_is_not_an_orphan(tree: Tree) -> None:
    stage = tree.root / f".cachectl-stage-{'0' * 32}"
    stage.mkdir(parents=True)
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print(1, flush=True); input()"
    with running(*python(program, stage)):
        assert entries(tree) == []
    assert keys(tree) == [stage.name]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("file", path)], ids=["pipe", "link"])
def test_an_entry_that_cannot_be_read_stays_unless_replaced(tree: Tree, make: Callable[[Path], None]) -> None:
    folder = fill(tree)
    make(folder / "strange")
    with pytest.raises(LayerError, match="cannot read strange: ") as caught:
        place(tree, "ab/0001", {"file": b"content"})
    assert caught.value.path == folder / "strange"
    assert sorted(os.listdir(folder)) == ["file", "strange"]
    place(tree, "ab/0001", {"file": b"content"}, replace=True)
    assert os.listdir(folder) == ["file"]
    assert os.listdir(tree.root) == ["ab"]


@pytest.mark.parametrize(("theirs", "refused"), [(b"content", False), (b"other", True)])
def test_what_another_process_places_meanwhile_counts_as_placed_if_it_is_the_same(
    tree: Tree, theirs: bytes, refused: bool
) -> None:
    @contextlib.contextmanager
    def guard(_root: int) -> Iterator[None]:
        place(tree, "ab/0001", {"file": theirs})
        yield

    (done,) = write_entries(tree, {"ab/0001": {"file": b"content"}}, guard=guard).values()
    assert isinstance(done, EntryExists) if refused else done is False
    assert tree.read_members("ab/0001") == {"file": theirs}


def test_two_that_replace_one_entry_at_once_leave_one_of_theirs(tree: Tree) -> None:
    contents = [{"one": bytes([letter]) * 5000} for letter in b"ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda content: place(tree, "ab/0001", content, replace=True), 40 * contents))
    assert tree.read_members("ab/0001") in contents
    assert os.listdir(tree.root) == ["ab"]


def test_special_files_are_neither_read_nor_waited_for(tmp_path: Path) -> None:
    files = Tree("test", tmp_path, Shape((re.compile("[a-f]{2}"),), folders=False))
    os.mkfifo(tmp_path / "ab")
    (tmp_path / "cd").symlink_to("/etc/hostname")
    os.truncate(os.open(tmp_path / "ef", os.O_CREAT | os.O_WRONLY), 1 << 41)
    assert keys(files) == ["ef"]
    assert (files.read_members("ab"), files.read_members("cd")) == (None, None)
    with pytest.raises(Unreachable, match="has more than 1,073,741,824 bytes"):
        files.read_members("ef")


def test_only_what_left_the_disk_is_counted_as_freed(tree: Tree, tmp_path: Path) -> None:
    folder = fill(tree, file=b"x" * 1000, other=b"y" * 10)
    os.link(folder / "file", tmp_path / "another name")
    freed = on_disk(folder, folder / "other")
    assert clear(tree).bytes_freed == freed


def test_what_an_empty_folder_keeps_from_going_by_its_list_is_counted_as_freed(tree: Tree) -> None:
    folder = fill(tree, file=b"x" * 9000)
    (folder / "empty/deeper").mkdir(parents=True)
    freed = on_disk(folder, *folder.rglob("*"))
    outcome = clear(tree)
    assert (outcome.removed, outcome.bytes_freed, folder.exists()) == (1, freed, False)


def test_a_full_disk_can_be_cleared_and_loses_nothing_to_put(mount: Callable[..., Path], tmp_path: Path) -> None:
    disk = mount("-t", "tmpfs", "-o", "nr_inodes=12,size=1m", "tmpfs", on=tmp_path / "disk")
    tree = Tree("test", disk / "root", SHAPE)
    fill(tree)
    with contextlib.suppress(OSError):
        for number in range(100):
            (disk / str(number)).touch()
    with pytest.raises(LayerError, match="No space left"):
        place(tree, "ab/0001", {"file": b"other"}, replace=True)
    assert tree.read_members("ab/0001") == {"file": b"content"}
    freed = on_disk(tree.root / "ab/0001/file")
    outcome = clear(tree)
    assert (outcome.removed, outcome.bytes_freed, outcome.failed) == (1, freed, ())


def test_what_is_no_entry_is_neither_listed_removed_nor_replaced(tmp_path: Path) -> None:
    tree = Tree("test", tmp_path, Shape(SHAPE.levels, folders=True, members=re.compile("file")))
    fill(tree, file=b"1", thesis=b"years")
    (tmp_path / "ab/0002").write_text("a file where a folder is due")
    (tmp_path / "cd").write_text("another")
    before = snapshot(tmp_path)
    assert entries(tree) == []
    assert tree.find("ab/0001") is None
    assert remove_things(tree, [Entry("test", "ab/0001", tree.root, 6, 2, stamp=(2, 6, 0))]).removed == 0
    for key, reason in (("ab/0001", "left alone"), ("ab/0002", "left alone"), ("cd/0001", "cannot write")):
        with pytest.raises(LayerError, match=reason):
            place(tree, key, {"file": b"2"}, replace=True)
    assert snapshot(tmp_path) == before


def test_an_entry_may_have_more_folders_than_files_may_be_open(tree: Tree) -> None:
    members = {f"kernel{number}/8-1-1/code": b"code" for number in range(80)}
    with limited(resource.RLIMIT_NOFILE, len(os.listdir("/dev/fd")) + 60):
        place(tree, "ab/0001", members)
    assert tree.read_members("ab/0001") == members


MEMBERS = {"program": b"p" * 5000, "kernel/code": b"c" * 3000, "empty": b""}


def test_a_file_in_the_way_stays_and_other_entries_are_placed(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tree.root / "ab/0001").mkdir(parents=True)
    (tree.root / "ab/0002").symlink_to(tmp_path / "outside")
    (tree.root / "ab/0003").write_text("no folder")
    (tree.root / "cd").symlink_to(tmp_path / "outside")
    free = {f"{folder}/{number:04}" for folder in ("ab", "ba", "ff") for number in range(10, 40)}
    refused = {"ab/0001", "ab/0002", "ab/0003", "cd/0000"}
    refused |= {"", "ab", "ab/0001/x", "../0001", "ab/../cd/0001", "/ab/0001", "ab/0001\n"}
    placed = write_entries(tree, dict.fromkeys(sorted(free | refused), MEMBERS))
    assert {key for key, result in placed.items() if result is True} == free
    assert {key for key, result in placed.items() if isinstance(result, LayerError)} == refused
    assert {key: tree.read_members(key) for key in free} == dict.fromkeys(free, MEMBERS)
    assert {tree.read_members(key) for key in refused - {"ab/0001"}} == {None}
    assert os.listdir(tmp_path / "outside") == os.listdir(tree.root / "ab/0001") == []
    assert (tree.root / "ab/0003").read_text() == "no folder"
    assert not [name for name in os.listdir(tree.root) if OWN_TEMPORARY.fullmatch(name)]


def test_a_lock_stays_in_the_folder_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyOpenCL's lock is never made in, or removed from, a folder that replaced another."""
    inside, moved = tmp_path / "base", tmp_path / "moved"
    inside.mkdir()
    # A file in the working directory is not a lock.
    monkeypatch.chdir(write(tmp_path / "cwd/lock", "").parent)
    with presence_lock("pyopencl", inside / "lock", this_environment()):
        inside.rename(moved)
        write(inside / "lock", "")
        assert os.listdir(moved) == ["lock"]
    assert (os.listdir(moved), os.listdir(inside)) == ([], ["lock"])
    (tmp_path / "link").symlink_to(moved)
    with pytest.raises(Unreachable), presence_lock("pyopencl", tmp_path / "link/lock", this_environment()):
        pass
    assert os.listdir(moved) == []


def test_what_went_before_a_failure_is_counted_and_the_failure_said(tree: Tree) -> None:
    @contextlib.contextmanager
    def guard(_root: int) -> Iterator[None]:
        yield
        raise OSError(errno.EIO, "Input/output error")

    fill(tree)
    outcome = remove_things(tree, entries(tree), guard=guard)
    assert (outcome.removed, *outcome.failed) == (1, Note(str(tree.root), "cannot be cleared: Input/output error"))


def test_without_room_for_a_trash_nothing_beside_a_folder_goes(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of an entry may have the same names as other files next to it."""
    monkeypatch.setattr("cachectl.layers.stores.tree_remove._make_trash", lambda *_: None)
    write(tmp_path / "outside/thesis.tex", "precious")
    entry = fill(tree, file=b"content", log=b"text")
    write(entry / "docs/thesis.tex", "of the entry")
    write(entry.with_name("file"), "the user's own")
    entry.with_name("docs").symlink_to(tmp_path / "outside")
    freed = on_disk(entry, *entry.rglob("*"))
    outcome = clear(tree)
    assert (outcome.removed, outcome.bytes_freed, entry.exists()) == (1, freed, False)
    assert entry.with_name("file").read_text() == "the user's own"
    assert (tmp_path / "outside/thesis.tex").read_text() == "precious"
