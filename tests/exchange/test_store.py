"""Shared stores: what another home pulls, what a push adds, and what gc and verify do."""

import hashlib
import os
import platform
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from homes import CACHECTL, Home, make_home
from support.bundles import TRUSTED, count, files, keys, programs
from support.miopen_kernels import add_kernels
from support.tracing import numbers, trace
from tiers import thorough, thorough_only

from cachectl.exchange import place, trust, wire
from cachectl.exchange.push_pull import RunStore
from cachectl.exchange.store import StoreCollection
from cachectl.layers.base import errors
from cachectl.layers.core.entry import Artifact, Entry
from cachectl.layers.formats.details import Details
from cachectl.layers.host.here import this_environment
from cachectl.stack import Stack
from cachectl.transfer import Moved


@pytest.mark.real
@pytest.mark.parametrize("name", ["store", *thorough("store.zip")])
def test_another_home_compiles_nothing_and_pushes_only_what_is_new(
    source: Home, home: Home, tmp_path: Path, name: str
) -> None:
    store = tmp_path / name
    done = source.json(f"push {store}")
    assert (done["total"]["placed"], source.json(f"push {store}")["moved"]) == (len(keys(source)), 0)
    pulled = home.json(f"pull {store} --trust")
    assert pulled["digest"] == done["digest"]
    assert {one["hits"] for layer in pulled["layers"] for one in layer["outlook"]} == {True}
    assert (keys(home), programs(home)) == (keys(source), compiled := programs(source))

    before = files(store)
    traced = trace(home, "thirteen.py", "5", "2")
    # All but the fifth kernel were hits, and nothing was stored twice.
    assert len(programs(home) - compiled) == 1
    assert (numbers(traced, "pocl"), numbers(traced, "loopy")[2]) == ((6, 1, 1), 5)
    grown = {layer: number - count(source)[layer] for layer, number in count(home).items()}
    assert grown == {**dict.fromkeys(grown, 1), "loopy": 5}
    again = home.json(f"push {store}")
    assert again["total"]["placed"] == len(keys(home)) - len(keys(source))
    assert home.json(f"store verify {store}")["findings"] == []
    if name == "store":
        after = files(store)
        new = after.keys() - before.keys()
        # A pack and an index part for each layer that the kernel goes through.
        assert sum(name.startswith("packs/") for name in new) == sum(name.startswith("index/") for name in new) == 3
        assert sum(len(after[name]) for name in new) == again["moved"]
        assert before.items() <= after.items()


@pytest.fixture
def cheap(home: Home) -> Home:
    """Return a home with ten kernels, of which two are large."""
    add_kernels(home, range(8))
    add_kernels(home, range(8, 10), size=300 << 10)
    return home


def at(home: Home, moment: float) -> Stack:
    """Return the layers of a home at a moment."""
    return Stack(home.environment()._replace(clock=lambda: moment))


def test_a_store_says_what_will_hit_and_what_was_left_alone(cheap: Home, other: Home, tmp_path: Path) -> None:
    store = f"{tmp_path}/store"
    cheap.cachectl(f"push {store} miopen")
    listed = cheap.json(f"store ls {store}")
    assert [(key["layer"], key["entries"], key["parts"]) for key in listed["keys"]] == [("miopen", 10, 1)]
    before = files(other.path)
    foreseen = other.json(f"pull {store} --trust --dry-run")
    assert files(other.path) == before
    assert len(foreseen["layers"][0]["entries"]) == foreseen["total"]["placed"] == 10
    done = other.json(f"pull {store} --trust")
    assert (foreseen["dry_run"], foreseen["total"], foreseen["digest"]) == (True, done["total"], listed["digest"])
    # Keys of a layer that is missing here, and of tuning results.
    folder = place.FolderPlace(Path(store))
    for layer, why in (("unheard-of", "no layer with this name"), ("miopen-tuning", "only if it is named")):
        key = wire.StoreKey(layer, {})
        part = f"index/5-{key.name}-{'0' * 64}"
        folder.write(f"index/key-{key.name}", key.to_bytes())
        folder.write(part, b"never read")
        (note,) = other.stack.pull(store, TRUSTED).unread
        assert (note.key, why in note.because) == (layer, True)
        folder.remove([part])
    pulled = Stack(other.environment()._replace(platform="darwin")).pull(store, TRUSTED)
    assert (pulled.layers, len(pulled.unread)) == ((), 1)
    assert "platform linux, here darwin" in pulled.unread[0].because


@thorough_only
def test_a_signed_push_does_not_count_on_what_others_have_pushed(
    cheap: Home, other: Home, tmp_path: Path, keygen: Callable[[str], str]
) -> None:
    store, ann, bob = f"{tmp_path}/store", keygen("ann"), keygen("bob")
    both = tmp_path / "both"
    both.write_text("".join(f"x@{Path(name).name} {Path(f'{name}.pub').read_text()}" for name in (ann, bob)))
    for key, allowed, placed in ((None, None, 10), (ann, None, 10), (ann, None, 0), (bob, None, 10), ("eve", both, 0)):
        signer = keygen("eve") if key == "eve" else key
        done = cheap.stack.push(store, sign=signer, allowed_signers=None if allowed is None else str(allowed))
        assert (done.total.placed, done.total.there) == (placed, 10 - placed)
    assert other.stack.pull(store, trust.Trust(allowed_signers=str(both))).total.placed == 10
    check = cheap.stack.store(store).verify(allowed_signers=str(both))
    assert [one.code for one in check.findings] == ["untrusted"]


def test_gc_removes_the_oldest_and_later_what_nothing_lists(cheap: Home, other: Home, tmp_path: Path) -> None:
    folder, day, now = tmp_path / "store", 86400, time.time()
    store = str(folder)
    at(cheap, now - 9 * day).push(store)
    add_kernels(cheap, [20])
    at(cheap, now - day).push(store)
    stack = at(cheap, now)
    before = files(folder)
    planned = stack.store(store).gc(older_than=3 * day, dry_run=True)
    # A machine with a wrong clock removes nothing.
    with pytest.raises(errors.CachectlError, match="set the clock"):
        at(cheap, now + 365 * day).store(store).gc(older_than=30 * day)
    assert files(folder) == before
    assert (len(planned.parts), planned.entries, planned.removed) == (1, 10, 0)
    assert stack.store(store).gc(older_than=3 * day)._replace(dry_run=True) == planned
    assert [one.code for one in stack.store(store).verify().findings] == ["unlisted"] * 3
    # A push lists no pack that was there before.
    assert stack.push(store).total.placed == 10
    assert stack.store(store).gc().removed == 0
    # What a killed push left goes, and what is not of a store stays.
    notes, old, new = (
        folder / "packs" / name for name in (".cachectl-stage-notes", *(f".cachectl-stage-{x * 32}" for x in "ab"))
    )
    for path in (notes, old, new):
        path.write_bytes(b"half")
    for path in (*folder.rglob("packs/*"), old):
        if path != new:
            os.utime(path, (now - 2 * day,) * 2)
    assert (stack.store(store).gc().removed, stack.store(store).verify().findings) == (4, ())
    assert other.stack.pull(store, TRUSTED).total.placed == 11
    done = stack.store(store).gc(max_size=100)
    assert (len(done.parts), done.entries, done.removed, done.kept) == (2, 11, 4, 0)
    assert set((folder / "packs").iterdir()) == {notes, new}
    assert other.stack.pull(store, TRUSTED).total.there == 0


def after_a_listing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, right after a folder of a store has been listed."""
    listed = place.FolderPlace.names

    def names(folder_place: place.FolderPlace, folder: str) -> Mapping[str, place.Written]:
        found = listed(folder_place, folder)
        monkeypatch.undo()
        act()
        return found

    monkeypatch.setattr(place.FolderPlace, "names", names)


@thorough_only
def test_a_part_that_gc_removes_meanwhile_is_no_error(
    cheap: Home, other: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    cheap.stack.push(store)
    (part,) = store.glob("index/[0-9]*")
    content = part.read_bytes()
    after_a_listing(monkeypatch, part.unlink)
    assert other.stack.pull(store, TRUSTED).total.placed == 0
    part.write_bytes(content)
    after_a_listing(monkeypatch, part.unlink)
    assert other.stack.store(store).ls().keys == ()


def test_what_a_base_has_is_not_taken_from_a_root_either(cheap: Home, other: Home) -> None:
    (known, *rest) = sorted(entry.key for entry in cheap.stack["miopen"].entries())
    done = other.stack.pull(cheap.path, layers=["miopen"], besides={"miopen": [known]})
    assert (done.total.placed, done.total.there) == (len(rest), 1)
    assert sorted(entry.key for entry in other.stack["miopen"].entries()) == rest


def test_a_part_that_is_pushed_meanwhile_is_not_taken_for_removed(
    cheap: Home, other: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of one user push at once, and a third one pulls."""
    store = str(tmp_path / "store")
    add_kernels(other, range(100, 103))
    first, second, third = (
        Stack(home.environment(XDG_STATE_HOME=f"{tmp_path}/own"))
        for home in (cheap, other, make_home(tmp_path / "third"))
    )
    after_a_listing(monkeypatch, lambda: second.push(store))
    placed = first.push(store).total.placed
    done = third.pull(store, TRUSTED)
    assert (done.total.placed, done.left_out) == (placed + 3, ())


def test_a_command_runs_with_a_store_around_it(cheap: Home, other: Home, tmp_path: Path) -> None:
    store = f"{tmp_path}/store"
    around = f"run --store {store} --trust"
    done = cheap.cachectl(f"{around} -- false", check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "cachectl: store: miopen: 10 pushed")
    for said in ("cachectl: store: miopen: 10 pulled\n", ""):
        done = other.cachectl(f"{around} --store-mode ro --isolated=root -- false", check=False)
        assert (done.returncode, done.stderr) == (1, said)
    assert not (other.path / ".cache/miopen").exists()
    assert len(list(Stack.below(f"{other.path}/root", other.environment())["miopen"].entries())) == 10
    # A damaged store is one warning, and the command runs; nothing is pushed.
    next((tmp_path / "store/packs").iterdir()).write_bytes(b"damaged")
    add_kernels(other, [70])
    before = files(tmp_path / "store")
    said = other.cachectl(f"{around} -- true").stderr
    assert ("nothing is pulled or pushed" in said, said.count("\n")) == (True, 1)
    assert files(tmp_path / "store") == before


def test_users_share_a_folder_whatever_their_umask_is(cheap: Home, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o2775)
    before = os.umask(0o077)
    try:
        cheap.stack.push(store)
    finally:
        os.umask(before)
    modes = {(path.is_file(), stat.S_IMODE(path.stat().st_mode)) for path in store.rglob("*")}
    assert modes == {(True, 0o644), (False, 0o2775)}


@thorough_only
def test_entries_of_a_base_are_neither_pulled_nor_pushed(cheap: Home, other: Home, tmp_path: Path) -> None:
    store, base, own = (str(tmp_path / name) for name in ("store", "base", "own"))
    trusting = f"run --store {store} --trust"
    cheap.stack.push(store)
    other.cachectl(f"{trusting} --store-mode ro --isolated={base} -- true")
    add_kernels(cheap, [30])
    cheap.stack.push(store)
    add_kernels(cheap, [31])
    # Nothing but the thirtieth kernel is read from the store.
    newest = max((tmp_path / "store/packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for pack in set((tmp_path / "store/packs").iterdir()) - {newest}:
        pack.unlink()
    fill = (*CACHECTL, "pull", str(cheap.path), f"--root={own}")
    done = other.cachectl(f"{trusting} --base {base} --isolated={own} --", *fill)
    assert [line for line in done.stderr.splitlines() if line.startswith(("cachectl: store", "cachectl: base"))] == [
        "cachectl: store: miopen: 1 pulled",
        "cachectl: base: miopen: 10 copied",
        "cachectl: store: miopen: 1 pushed",
    ]
    for root, entries in ((own, 12), (base, 10)):
        assert len(list(Stack.below(root, other.environment())["miopen"].entries())) == entries


def kept_of(home: Home, store: Path) -> Path:
    """Return the folder with what is kept of a store."""
    name = hashlib.sha256(f"{platform.node()}:{store}".encode()).hexdigest()[:32]
    return home.path / ".local/state/cachectl/stores" / name


def test_no_file_is_removed_through_a_planted_link(cheap: Home, tmp_path: Path) -> None:
    """The address of a store is public: another user may know the name of the folder that is kept for it."""
    store, private = tmp_path / "store", tmp_path / "private"
    cheap.stack.push(store)
    name = kept_of(cheap, store).name
    private.mkdir(mode=0o700)
    for file in ("thesis.tex", f"key-{'0' * 16}"):
        (private / file).write_bytes(b"years of work")
    for number, variable in enumerate(("XDG_CACHE_HOME", "XDG_STATE_HOME")):
        shared = tmp_path / f"shared-{number}"
        planted = shared / "cachectl/stores"
        planted.mkdir(parents=True)
        shared.chmod(0o1777)
        (planted / name).symlink_to(private)
        if os.geteuid() == 0:
            for path in (shared / "cachectl", planted, planted / name):
                os.chown(path, 65534, 65534, follow_symlinks=False)
        home = Home(cheap.path, {**cheap.variables, variable: str(shared)})
        for line in (f"push {store}", f"pull {store} --trust", f"store ls {store}"):
            home.cachectl(line)
        assert sorted(os.listdir(private)) == [f"key-{'0' * 16}", "thesis.tex"]
    # In a folder of one's own, only files of an index go.
    kept = kept_of(cheap, store)
    (kept / f"key-{'0' * 16}").touch()
    (kept / f"key-{'1' * 16}").symlink_to(private / "thesis.tex")
    (kept / "notes.txt").touch()
    before = set(os.listdir(kept)) - {f"key-{'0' * 16}"}
    cheap.cachectl(f"pull {store} --trust")
    assert set(os.listdir(kept)) == before | {"seen.json"}


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_a_folder_that_is_put_in_the_place_of_a_new_one_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Who can write in the folder of a store can replace what was made there before it is opened."""
    store = tmp_path / "store"
    private = store / "private"
    private.mkdir(parents=True, mode=0o700)
    (private / "thesis.tex").touch()
    store.chmod(0o777)
    make = os.mkdir

    def replaced(path: str | Path, mode: int = 0o777, **given: int) -> None:
        make(path, mode, **given)
        if os.path.basename(path) == "index":
            os.rename(store / "index", store / "away")
            (os.symlink if planted == "link" else os.rename)(private, store / "index")

    monkeypatch.setattr(os, "mkdir", replaced)
    refused = pytest.raises(errors.CachectlError, match="link, or not a folder")
    with refused if planted == "link" else nullcontext():
        place.FolderPlace(store).write(f"index/key-{'0' * 16}", b"key")
    # Through the link, where there is one.
    assert stat.S_IMODE((store / "index").stat().st_mode) == 0o700


def test_a_store_that_never_answers_keeps_no_command(cheap: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"oci://127.0.0.1:{server.getsockname()[1]}/caches"
        said: list[str] = []
        assert cheap.stack.run(["false"], store=RunStore(silent, TRUSTED, wait=1.5), notice=said.append)[0] == 1
    assert ["not done in time" in line for line in said if "--store" in line] == [True]


@thorough_only
def test_entries_with_many_kernels_are_listed_in_parts_that_a_reader_takes(tmp_path: Path) -> None:
    here, key = this_environment(), wire.StoreKey("pocl", {})
    names = tuple(f"kernel_{number:090}" for number in range(600))
    contents = [
        (Entry("pocl", name, Path(), 0, 1, details=Details(names)), Artifact("pocl", name, "pocl/1", b""))
        for name in map(str, range(700))
    ]
    StoreCollection(place.FolderPlace(tmp_path), here).write(key, iter(contents), Moved("pocl"))
    index = StoreCollection(place.FolderPlace(tmp_path), here)
    assert sum(len(index.part(name).entries) for name in index.parts) == 700
