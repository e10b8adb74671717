"""Bundles: what another home and another environment hit, and what a changed one does."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from homes import CACHECTL, Home, make_home
from support.bundles import TRUSTED, count, listed, programs, refused
from support.environments import another_venv
from support.miopen_kernels import add_kernels
from tiers import real, thorough, thorough_only

from cachectl.exchange import place, portability, trust
from cachectl.exchange.bundle import BundlePlace
from cachectl.layers.base import errors
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.layer import Layer, put_many
from cachectl.layers.cuda import CudaComputeCache
from cachectl.stack import Stack

# ---------------------------------------------------------------------- warm elsewhere


@thorough_only
@real
def test_the_same_content_is_the_same_bytes(source: Home, packed: Path, home: Home, tmp_path: Path) -> None:
    home.stack.pull(packed, TRUSTED)
    for name, one in (("again.zip", source), ("elsewhere.zip", home)):
        done = one.stack.push(tmp_path / name)
        assert done.digest == hashlib.sha256(packed.read_bytes()).hexdigest()
        assert (tmp_path / name).read_bytes() == packed.read_bytes()
        assert one.stack.push(tmp_path / name).moved == 0
    document = source.json("push", f"{tmp_path}/one.zip", "pocl", "--kernel", "lk1")
    assert [(layer["layer"], layer["placed"]) for layer in document["layers"]] == [("pocl", 1)]
    assert "home" in document["layers"][0]["sensitive"]


# ---------------------------------------------------------------------- what is foreseen


@real
def test_entries_that_cannot_be_hit_are_foreseen_and_left_out(packed: Path, home: Home) -> None:
    environment = home.environment()._replace(python="3.9.1.final.0")
    done = Stack(environment).pull(str(packed), TRUSTED)
    layers = {layer.layer: layer for layer in done.layers}
    assert layers["loopy"].placed == 0
    assert all("3.9.1.final.0" in one.words for one in layers["loopy"].foreseen)
    assert layers["pocl"].placed > layers["pocl"].cannot_hit == 0


@pytest.mark.thorough
@real
def test_misses_in_another_virtual_environment_are_those_foreseen(packed: Path, home: Home, tmp_path: Path) -> None:
    python = another_venv(tmp_path / "venv")
    document = json.loads(home.run(python, "-m", "cachectl", "pull", str(packed), "--trust", "-n", "--json").stdout)

    seen = {layer["layer"]: layer["outlook"] for layer in document["layers"]}
    # No entry of PoCL can hit: the whole part of the index is left alone.
    assert "pocl" not in seen
    (because,) = (note["because"] for note in document["unread"] if note["key"] == "pocl")
    assert f"{tmp_path}/venv/lib/" in because
    assert [one["hits"] for one in seen["loopy"]] == [True]
    # Placed nevertheless, by a cachectl that sees the other PyOpenCL, they are missed there, and only they.
    home.stack.pull(packed, TRUSTED)
    already, compiled = count(home), programs(home)
    home.run(python, f"{home.programs}/thirteen.py", "4", "2")
    assert not compiled & (programs(home) - compiled)
    assert len(programs(home)) == 2 * len(compiled)
    assert {**count(home), "pocl": 0} == {**already, "pocl": 0}


def test_another_driver_decides_and_an_unknown_one_does_not(home: Home) -> None:
    environment, cuda = home.environment(), CudaComputeCache.about.portability
    version = environment.processes / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    there = portability.portability_key(cuda, environment)
    assert there["NVIDIA driver"] == "535.104.05"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n")
    differing = portability.differences(cuda, there, environment)
    assert "NVIDIA driver 535.104.05" in str(portability.why_not(cuda, differing))
    version.unlink()
    differing = portability.differences(cuda, there, environment)
    assert portability.why_not(cuda, differing) is None
    assert portability.outlook(cuda, {"driver": "535.104.05"}, there, environment, differing).hits is None


# ---------------------------------------------------------------------- a changed bundle


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a bundle of three kernels, of which one has a pack of its own."""
    home = make_home(tmp_path / "packing")
    add_kernels(home, range(2))
    add_kernels(home, [2], size=300 << 10)
    home.stack.push(f"{tmp_path}/small.zip")
    return tmp_path / "small.zip"


def added(member: str | zipfile.ZipInfo, method: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """Return what adds a member to a bundle; without a name, once more the first one."""

    def change(file: Path) -> None:
        with zipfile.ZipFile(file, "a") as bundle:
            bundle.writestr(member or bundle.namelist()[0], bytes(1 << 20), method)

    return change


def ended(start: int | None, directory: bytes, length: int) -> Callable[[Path], None]:
    """Return what gives a bundle another directory, at its place or elsewhere, and an end that announces it."""

    def change(file: Path) -> None:
        whole = file.read_bytes()
        at = struct.unpack("<L", whole[-6:-2])[0]
        rest = whole[:-22] if start is not None else whole[:at]
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 3, 3, length, at if start is None else start, 0)
        file.write_bytes(rest + directory + end)

    return change


def overlapping(file: Path) -> None:
    """Each member would be copied by the next push: a small file would fill the disk."""
    with zipfile.ZipFile(file) as old:
        largest = max(old.infolist(), key=lambda info: info.file_size)
        data, offset = old.read(largest), largest.header_offset
    with zipfile.ZipFile(file, "a") as new:
        for number in range(9):
            again = zipfile.ZipInfo(f"packs/{number:064}")
            again.CRC, again.compress_size, again.file_size = zlib.crc32(data), len(data), len(data)
            again.header_offset = offset
            new.filelist.append(again)
        new._didModify = True  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Duplicate")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((added(name), "not a member") for name in ("../evil", "/etc/passwd", "packs/../../x", "index/", "")),
        (added("packs/" + "1" * 64, zipfile.ZIP_DEFLATED), "not a member"),
        (overlapping, "overlap"),
        # An end that announces a directory of a gibibyte is not believed, and many members are not read.
        (ended(0, b"", 1 << 30), "too large"),
        (ended(0, b"", 46), "not where it should be"),
        (ended(None, struct.pack("<4s42x", b"PK\1\2") * 600_000, 46 * 600_000), "too large"),
        (lambda file: file.write_bytes(b"PK\5\6" + bytes(18)), "is not a bundle"),
    ],
)
def test_a_zip_that_no_push_wrote_is_refused_whole(
    small: Path, home: Home, change: Callable[[Path], None], words: str
) -> None:
    change(small)
    assert words in refused(home, small)


def test_no_member_is_ever_made_a_file(small: Path, home: Home) -> None:
    link = zipfile.ZipInfo("packs/" + "0" * 64)
    link.external_attr = 0o120777 << 16
    added(link)(small)
    assert home.stack.pull(small, TRUSTED).total.placed == 3


def test_a_bundle_is_read_from_a_pipe_of_a_shell(small: Path, home: Home) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"):
        os.write(writing, small.read_bytes())
        os.close(writing)
        assert home.stack.pull(f"/dev/fd/{reading}", TRUSTED, dry_run=True).total.placed == 3


@thorough_only
@pytest.mark.parametrize("name", ["bundle.zip", *thorough("gfx90a6e.kdb")])
def test_pushes_into_one_file_at_once_lose_nothing(home: Home, tmp_path: Path, name: str) -> None:
    add_kernels(home, range(8))
    file, stack = str(tmp_path / name), home.stack
    push = [*CACHECTL, "push", file, "miopen", "--key"]
    started = [subprocess.Popen([*push, entry.key], env=home.variables, stdout=-3) for entry in stack.entries()]
    assert [process.wait() for process in started] == [0] * 8
    assert stack.pull(file, TRUSTED).total.there == 8
    assert list(tmp_path.glob(".cachectl-*")) == []
    assert not name.endswith(".zip") or stack.store(file).verify().findings == ()


def test_a_bundle_is_pruned_at_once(small: Path, home: Home) -> None:
    add_kernels(home, range(10, 12))
    before = small.stat().st_size
    old = set(zipfile.ZipFile(small).namelist())
    stack = home.stack
    stack.push(small)
    (pack,) = [one for one in zipfile.ZipFile(small).infolist() if one.filename[0] == "p" and one.filename not in old]
    done = stack.store(small).gc(max_size=pack.file_size)
    assert (done.entries, done.removed) == (3, 2)
    assert small.stat().st_size < before
    assert stack.store(small).verify().findings == ()
    assert len(listed(small)) == 2
    with pytest.raises(errors.BadRequest, match="no times"):
        stack.store(small).gc(older_than=1.0)


def test_a_bundle_travels_through_a_registry(small: Path, home: Home, real_registry: str) -> None:
    stack, url = home.stack, f"{real_registry}/team/caches:main"
    assert stack.pull(small, TRUSTED).total.placed == 3
    with pytest.raises(place.Missing):
        stack.pull(url, TRUSTED)
    done = stack.push(url)
    assert done.digest == hashlib.sha256(small.read_bytes()).hexdigest()
    assert stack.push(url).moved == 0
    stack.purge()
    assert stack.pull(url, trust.Trust(digest=done.digest)).total.placed == 3
    add_kernels(home, [20])
    assert stack.push(url).total.placed == 1
    assert stack.store(url).verify().entries == 4


# ---------------------------------------------------------------------- signers


def test_a_signer_is_named_as_far_as_the_list_says_who_it_is(
    home: Home, tmp_path: Path, keygen: Callable[[str], str]
) -> None:
    key = keygen("key")
    public = Path(f"{key}.pub").read_text()
    signature = trust.sign(b"text", key)
    for principals, name in (
        ("*@example.org,ann@example.org", "ann@example.org"),
        ("!eve@example.org,*@example.org", "*@example.org"),
    ):
        (tmp_path / "allowed").write_text(f"{principals} {public}")
        allowed = (home.environment(), f"{tmp_path}/allowed")
        assert trust.signer(*allowed, b"text", signature).startswith(name)
        with pytest.raises(place.BadStore):
            trust.signer(*allowed, b"other", signature)
        with pytest.raises(trust.Untrusted, match="not signed"):
            trust.signer(*allowed, b"text", b"")
    with pytest.raises(errors.BadRequest, match="ssh-keygen -t ed25519 -f"):
        trust.sign(b"text", f"{tmp_path}/none")
    for wrong in ({}, {"digest": "0" * 64, "trust": True}, {"digest": "12"}):
        with pytest.raises(errors.BadRequest):
            trust.Trust(**wrong)


def test_a_bundle_needs_the_room_of_one_copy(home: Home, disk: Path) -> None:
    """It grows in an unnamed file that becomes the bundle."""
    for number, length in enumerate((3 << 20, 1 << 20)):
        bundle = BundlePlace(disk / "new.zip", home.environment(), writes=True)
        assert len(bundle.names("packs")) == number
        bundle.write(f"packs/{number:064}", os.urandom(length))
        bundle.finish()
    assert list(disk.glob("*")) == [disk / "new.zip"]


def test_a_first_push_does_not_replace_a_faster_one(home: Home, tmp_path: Path) -> None:
    first, second = (BundlePlace(tmp_path / "new.zip", home.environment(), writes=True) for _ in range(2))
    assert (first.names("index"), second.names("index")) == ({}, {})
    # Both have looked before either of them is done.
    for number, bundle in enumerate((first, second)):
        bundle.write(f"index/key-{number:016}", b"\n")
    first.finish()
    with pytest.raises(place.Changed):
        second.finish()
    assert zipfile.ZipFile(tmp_path / "new.zip").namelist() == [f"index/key-{0:016}"]
    assert list(tmp_path.glob(".cachectl-*")) == []


@pytest.mark.parametrize("at", ["of the layer", "of each"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOSPC, "No space left on device"), "No space left on device"), (SystemExit(3), "SystemExit: 3")],
)
def test_what_was_placed_before_a_failure_is_counted(
    small: Path, home: Home, monkeypatch: pytest.MonkeyPatch, *, error: BaseException, reason: str, at: str
) -> None:
    put = put_many

    def fails(layer: Layer, artifacts: Sequence[Artifact], **more: bool) -> list[BaseException]:
        put(layer, artifacts[:2], **more)
        if at == "of the layer":
            raise error
        return [error for _ in artifacts]

    monkeypatch.setattr("cachectl.exchange.copying.put_many", fails)
    done = Stack(home.environment()).pull(small, TRUSTED)
    assert (done.total.placed, done.total.failed) == (2, 1)
    assert {note.because for layer in done.layers for note in layer.failed} == {reason}
    assert len(list(Stack(home.environment()).entries(layers=["miopen"]))) == 2
