"""Staging on one node, without MPI."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest
from support.stage import manifest, no_home

from cachectl.cluster.staging import NodeRoot, Sink
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.pocl.parts import PoclPortability
from cachectl.moving import merging
from cachectl.moving.bundle import BadBundle, Item, Manifest, Reader, write_bundle
from cachectl.moving.merging import merge_bundles
from cachectl.moving.portability import portability_key
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


# ---------------------------------------------------------------------- one node, without MPI


@pytest.fixture(scope="module")
def packed(filled: Home, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the bundle of a home in which real programs have run, and its sum."""
    file = tmp_path_factory.mktemp("packed") / "warm.cachectl"
    done = Stack(filled.environment()).export(str(file))
    assert done.sha256 is not None
    return file, done.sha256


@pytest.fixture
def here(home: Home) -> Environment:
    return home.environment()


def fill(node: NodeRoot, packed: tuple[Path, str]) -> None:
    file, digest = packed
    with file.open("rb") as opened:
        node.fill(opened, str(file), digest)


@pytest.mark.real
def test_a_node_is_filled_looked_through_and_emptied(
    here: Environment, home: Home, packed: tuple[Path, str], tmp_path: Path
) -> None:
    node = NodeRoot.make(here, tmp_path / "scratch" / "below")
    fill(node, packed)
    assert node.root is not None
    assert node.notes == []
    assert node.placed == len(manifest(packed[0]).items)
    assert node.new() == frozenset()

    changes = {name: value for name, value in node.variables.items() if value is not None}
    # A loopy kernel that is in the bundle, and a program that is not.
    home.python("thirteen.py", "1", "1", **changes)
    new = node.new()
    assert [layer for layer, _ in new] == ["pocl"]
    out = node.pack(new)
    assert out is not None
    with out:
        assert {(item.layer, item.key) for item in Reader(out, packed[0].stat().st_size).manifest.items} == new
    root = node.root
    node.remove()
    assert not root.exists()
    assert no_home(home)


@pytest.mark.real
def test_a_job_of_one_process_is_warm(home: Home, packed: tuple[Path, str]) -> None:
    file, digest = packed
    program = (sys.executable, str(home.programs / "thirteen.py"), "1", "0")
    traced = (sys.executable, "-m", "cachectl", "trace", "--json", "trace.json", "--", *program)
    home.cachectl("stage", "in", str(file), "--sha256", digest, "--", *traced)
    layers = {one["layer"]: one for one in json.loads((home.path / "trace.json").read_text())["layers"]}
    assert {name: layers[name]["misses"] for name in ("loopy", "pyopencl-invoker", "pocl")} == {
        "loopy": 0,
        "pyopencl-invoker": 0,
        "pocl": 0,
    }
    assert layers["pocl"]["hits"] == 1
    assert no_home(home)


@pytest.mark.real
def test_a_node_with_another_processor_starts_cold_and_says_why(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("model name : another\nflags : none\n\n")
    node = NodeRoot.make(replace(here, processes=tmp_path / "proc"), tmp_path / "scratch")
    fill(node, packed)
    assert node.root is not None
    # What loopy generates does not depend on the processor.
    assert node.placed == sum(item.layer != "pocl" for item in manifest(packed[0]).items)
    assert any("pocl starts cold" in note and "another processor" in note for note in node.notes)
    node.remove()


@pytest.mark.real
def test_a_bundle_that_was_changed_on_the_way_leaves_a_node_cold(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    data = bytearray(packed[0].read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "changed").write_bytes(data)
    node = NodeRoot.make(here, tmp_path / "scratch")
    fill(node, (tmp_path / "changed", packed[1]))
    assert node.placed == 0
    assert len(node.notes) == 1
    assert node.notes[0].startswith("starts cold: ")
    assert node.root is not None
    assert node.variables
    node.remove()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a way to mount a disk of a size, where this user may."""
    with ExitStack() as stack:

        def mount(size: str) -> Path:
            on = tmp_path / "disk"
            on.mkdir()
            if shutil.which("mount") is None:
                pytest.skip("this system has no mount command")
            words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(on)]
            if subprocess.run(words, capture_output=True, check=False).returncode:
                pytest.skip("this user may not mount")
            stack.callback(subprocess.run, ["umount", "-l", str(on)], check=True)
            return on

        yield mount


def test_a_full_disk_is_left_alone(here: Environment, disk: Callable[[str], Path]) -> None:
    on = disk("512k")
    node = NodeRoot.make(here, on)
    assert node.root is None
    assert node.variables == {}
    assert "No space left" in node.notes[0]
    assert list(on.iterdir()) == []
    assert node.receive() is None
    assert node.new() == frozenset()


@pytest.mark.real
def test_a_disk_that_fills_up_on_the_way_is_left_alone(
    here: Environment, disk: Callable[[str], Path], packed: tuple[Path, str]
) -> None:
    on = disk("1200k")
    node = NodeRoot.make(here, on)
    assert node.root is not None
    (on / "other").write_bytes(bytes(1000 << 10))
    fill(node, packed)
    assert node.root is None
    assert node.variables == {}
    assert "No space left" in node.notes[-1]
    assert [path.name for path in on.iterdir()] == ["other"]


def test_a_full_disk_drops_the_rest_of_the_broadcast(here: Environment, disk: Callable[[str], Path]) -> None:
    on = disk("2m")
    node = NodeRoot.make(here, on)
    sink = Sink(node)
    for _ in range(4):
        sink.write(bytes(1 << 20))
    assert sink.file is None
    assert node.root is None
    assert "No space left" in node.notes[0]
    assert list(on.iterdir()) == []


# ---------------------------------------------------------------------- bundles made one


@pytest.mark.real
def test_bundles_of_other_processors_are_not_mixed(here: Environment, packed: tuple[Path, str], tmp_path: Path) -> None:
    with packed[0].open("rb") as opened:
        reader = Reader(opened, packed[0].stat().st_size)
        contents = list(reader.contents())
    renamed = [(replace(item, key=f"{item.key}x"), data) for item, data in contents if item.layer == "pocl"]
    theirs = {**portability_key(PoclPortability(), here, [item for item, _ in renamed]), "processor": "another"}
    with (tmp_path / "theirs").open("w+b") as other, packed[0].open("rb") as first:
        items = tuple(item for item, _ in renamed)
        write_bundle(other, Manifest(items, {"pocl": theirs}), [data for _, data in renamed])
        done = merge_bundles(here, [first, other], str(tmp_path / "both"), base=True)
    assert done.foreign == {"pocl": len(renamed)}
    assert (done.entries, done.added) == (len(contents), 0)
    assert (tmp_path / "both").read_bytes() == packed[0].read_bytes()


@pytest.mark.real
def test_the_first_of_two_entries_of_one_key_is_kept(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    with packed[0].open("rb") as opened:
        reader = Reader(opened, packed[0].stat().st_size)
        contents = list(reader.contents())
    item, _ = contents[0]
    changed = replace(item, bytes=3, sha256=hashlib.sha256(b"new").hexdigest())
    with (tmp_path / "other").open("w+b") as other, packed[0].open("rb") as first:
        write_bundle(other, Manifest((changed,), {item.layer: reader.manifest.portability_keys[item.layer]}), [b"new"])
        done = merge_bundles(here, [first, other], str(tmp_path / "both"))
    assert done.differing == 1
    assert (tmp_path / "both").read_bytes() == packed[0].read_bytes()


def made(file: Path, entries: dict[str, tuple[bytes, str]], platform: str | None = "linux") -> BinaryIO:
    """Write a bundle of the ComputeCache: of each key the bytes, and the device."""
    items = tuple(
        Item("cuda", key, "cuda-entry/65", len(data), hashlib.sha256(data).hexdigest(), device=device)
        for key, (data, device) in sorted(entries.items())
    )
    facts = {"platform": platform, "devices": ", ".join(sorted({device for _, device in entries.values()}))}
    opened = file.open("w+b")
    write_bundle(
        opened, Manifest(items, {"cuda": facts} if items else {}), [data for _, (data, _) in sorted(entries.items())]
    )
    return opened


@pytest.mark.thorough
def test_however_entries_are_parted_merged_they_are_the_same_bytes(here: Environment, tmp_path: Path) -> None:
    draw = random.Random(6)  # noqa: S311 - sizes, no secrets
    entries = {f"{n:03}": (draw.randbytes(draw.choice((0, 1, 512, 70_000))), f"sm_{n % 5}") for n in range(200)}
    with made(tmp_path / "whole", entries) as whole:
        whole.flush()
        expected = (tmp_path / "whole").read_bytes()
    for number in (1, 2, 7, 64, 65, 150):
        owners = {key: draw.sample(range(number), draw.randint(1, min(number, 7))) for key in entries}
        asked = 0

        def parts(number: int = number, owners: dict[str, list[int]] = owners) -> Iterator[BinaryIO]:
            nonlocal asked
            before = len(os.listdir("/proc/self/fd"))
            for n in range(number):
                assert len(os.listdir("/proc/self/fd")) < before + 70
                asked += 1
                yield made(tmp_path / f"{n}", {key: entries[key] for key in entries if n in owners[key]})

        done = merge_bundles(here, parts(), str(tmp_path / "merged"), base=True)
        assert asked == number
        assert (done.entries, done.differing) == (200, 0)
        assert done.added == sum(0 not in owner for owner in owners.values())
        assert (tmp_path / "merged").read_bytes() == expected


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_the_same_entries_are_left_out_however_many_are_merged_at_once(
    here: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Each part at each place among those that are read side by side: foreign, unknown, or other bytes."""

    def parts() -> Iterator[BinaryIO]:
        for number, platform in enumerate(("linux", "win32", "linux", "win32", "linux", None, "win32", "linux")):
            entries = {"same": (b"%d" % (number // 2), "sm_90"), f"{number}": (b"own", f"sm_{number}")}
            yield made(tmp_path / f"{number}", entries, platform)

    whole = merge_bundles(here, parts(), str(tmp_path / "whole"), base=True)
    assert (whole.entries, whole.added) == (7, 5)
    assert (whole.differing, whole.foreign) == (5, {"cuda": 4})
    monkeypatch.setattr(merging, "_SIDE_BY_SIDE", at_once)
    done = merge_bundles(here, parts(), str(tmp_path / "parted"), base=True)
    assert done == replace(whole, file=done.file)
    assert (tmp_path / "parted").read_bytes() == (tmp_path / "whole").read_bytes()


def test_entries_that_were_not_taken_are_not_reported(here: Environment, tmp_path: Path) -> None:
    with made(tmp_path / "one", {"a": (b"1", "sm_90")}) as one, made(tmp_path / "two", {"a": (b"2", "sm_80")}) as two:
        done = merge_bundles(here, [one, two], str(tmp_path / "both"))
    assert done.differing == 1
    assert (tmp_path / "both").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_merge_takes_no_room_but_for_its_bundle(here: Environment, tmp_path: Path) -> None:
    """Of what is compressed nothing is kept beside: a rank's disk may be small."""
    import resource

    entries = {f"{n:03}": (bytes([n]) * 100_000, "sm_90") for n in range(100)}
    with made(tmp_path / "one", entries) as one, made(tmp_path / "two", {"x": (b"x", "sm_90")}) as two:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            done = merge_bundles(here, [one, two], str(tmp_path / "both"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.entries == 101
    assert done.bytes < 1 << 20


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_part_that_is_damaged_leaves_what_was_there(here: Environment, tmp_path: Path, damaged: int) -> None:
    """Even if all that is taken from it would be sound."""
    (tmp_path / "both").write_bytes(b"what was there")
    parts = {"one": {"a": (b"1", "sm_90")}, "two": {"a": (b"1", "sm_90")}}
    with ExitStack() as stack:
        opened = [stack.enter_context(made(tmp_path / name, entries)) for name, entries in parts.items()]
        opened[damaged].write(b"more")
        with pytest.raises(BadBundle):
            merge_bundles(here, opened, str(tmp_path / "both"))
    assert (tmp_path / "both").read_bytes() == b"what was there"


@pytest.mark.parametrize("damaged", [0, 1, 70])
@pytest.mark.parametrize("base", [True, False])
def test_a_merge_that_fails_leaves_no_part_open(here: Environment, tmp_path: Path, damaged: int, *, base: bool) -> None:
    taken: list[BinaryIO] = []

    def parts() -> Iterator[BinaryIO]:
        for number in range(100):
            taken.append(made(tmp_path / f"{number}", {f"{number:03}": (b"1", "sm_90")}))
            if number == damaged:
                taken[-1].seek(0)
                taken[-1].write(b"none")
            yield taken[-1]

    with pytest.raises(BadBundle):
        merge_bundles(here, parts(), str(tmp_path / "both"), base=base)
    assert all(part.closed for part in taken)
    assert not (tmp_path / "both").exists()


def test_a_part_that_does_not_come_leaves_no_other_open(here: Environment, tmp_path: Path) -> None:
    taken: list[BinaryIO] = []

    def parts() -> Iterator[BinaryIO]:
        for number in range(70):
            taken.append(made(tmp_path / f"{number}", {f"{number:03}": (b"1", "sm_90")}))
            yield taken[-1]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        merge_bundles(here, parts(), str(tmp_path / "both"))
    assert all(part.closed for part in taken)


def test_a_bundle_cannot_be_merged_into_a_folder_that_is_not_there(here: Environment, tmp_path: Path) -> None:
    with pytest.raises((OSError, CachectlError)):
        merge_bundles(here, [], str(tmp_path / "no" / "folder"))
