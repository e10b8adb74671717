"""Sizes that somebody else chose: what is too large is refused in one line, and takes neither memory nor the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from homes import Home
from tiers import thorough
from worlds import synthetic_world

from cachectl.exchange.folder import FolderPlace
from cachectl.exchange.format import Item, Pack, Part, StoreKey, file_of

pytest.importorskip("resource")

MIB = 1 << 20
#: What a verb takes where nothing is large: Python, what it imports, and zstd's buffers.
PLAIN = 160 * MIB
#: The size of one large entry: several times what else is in memory.
LARGE = 128 * MIB
_MEASURED = """
import resource, sys
status = 70
try:
    from cachectl.cli.main import main; status = main(sys.argv[1:])
finally:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sys.stderr.write(f"peak {peak}\\n")
sys.exit(status)
"""


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str
    #: The most memory that it had, in bytes.
    peak: int


def cachectl(home: Path, *arguments: str, source: int | None = None) -> Done:
    """Run a command in a child. The shell between keeps the size of this process out of the measurement."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", _MEASURED, *arguments],
        stdin=subprocess.DEVNULL if source is None else source,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "RUSTICL_ENABLE": "llvmpipe"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    stderr, _, peak = done.stderr.rstrip("\n").rpartition("peak ")
    assert peak, done
    return Done(done.returncode, done.stdout, stderr, int(peak))


# ---------------------------------------------------------------------- stores


def store_with(folder: Path, text: bytes) -> Path:
    """Make a store with one index part of a text."""
    place, key = FolderPlace(folder), StoreKey("pocl", {})
    place.write(f"index/key-{key.name}", key.to_bytes())
    file = file_of(text)
    place.write(f"index/1-{key.name}-{hashlib.sha256(file).hexdigest()}", file)
    return folder


def part(items: Iterable[Item]) -> bytes:
    pack = Pack("0" * 64, 1, 1)
    return Part(1, StoreKey("pocl", {}), tuple(replace(item, pack=pack) for item in items)).to_bytes()


def refused(home: Home, store: Path, *trust: str, because: str) -> Done:
    """Pull from a store, which one line refuses."""
    done = cachectl(home.path, "pull", str(store), *trust)
    assert (done.status, because in done.stderr, len(done.stderr.splitlines())) == (1, True, 1)
    return done


def test_an_untrusted_part_takes_little_memory(home: Home, tmp_path: Path) -> None:
    """It is unpacked up to a limit, and not parsed."""
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(25_000)]
    detail = {f"d{place}": "" for place in range(60)}
    text = part(Item("pocl", digest, "f", 0, digest, detail) for digest in digests)
    assert 16 * MIB < len(text) < 32 * MIB
    store = store_with(tmp_path / "store", text)
    allowed = tmp_path / "allowed"
    allowed.touch()
    assert refused(home, store, "--allowed-signers", str(allowed), because="not signed").peak < PLAIN
    bomb = store_with(tmp_path / "bomb", b"[[]" + b",[]" * (22 << 20) + b"]")
    assert refused(home, bomb, "--trust", because="bomb").peak < PLAIN


def test_a_push_holds_a_large_entry_once_more_than_its_file(home: Home, tmp_path: Path) -> None:
    program = home.path / ".cache" / "pocl" / "kcache" / "AB" / "ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
    program.mkdir(parents=True)
    (program / "program.spv").touch()
    os.truncate(program / "program.spv", LARGE)
    done = cachectl(home.path, "push", str(tmp_path / "bundle.zip"), "pocl")
    assert done.status == 0
    assert done.peak < 2 * LARGE + PLAIN


def test_a_source_that_is_no_bundle_is_not_read_to_its_end(home: Home) -> None:
    with open("/dev/zero", "rb") as endless:
        done = cachectl(home.path, "pull", "-", "--trust", source=endless.fileno())
    assert (done.status, "is not a bundle" in done.stderr) == (1, True)
    assert done.peak < PLAIN


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only the superuser can mount")
def test_the_folder_of_temporary_files_is_not_filled(home: Home, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    begun = "PK\\003\\004" + "\\000" * 26 + f"packs/{'0' * 64}"
    script = (
        f'mount -t tmpfs -o size=40m none "$1" || exit 77; (printf "{begun}"; cat /dev/zero) |'
        ' TMPDIR="$1" "$2" -m cachectl pull - --trust; status=$?; df --output=avail -B1 "$1" | tail -1; exit $status'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(small), sys.executable],
        env=home.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip("cannot mount here")
    assert done.returncode == 1
    assert f"{small} has no room for -" in done.stderr
    # The copy has no name, and goes with the process.
    assert int(done.stdout) == 40 * MIB


@pytest.mark.parametrize("character", ["\n", "\x1b", "\x9b", "\u202e"])
def test_keys_with_control_characters_are_refused_before_anything_is_written(
    home: Home, tmp_path: Path, character: str
) -> None:
    item = Item("pocl", f"AB/kernel{character}", "f", 1, hashlib.sha256(b"x").hexdigest())
    refused(home, store_with(tmp_path / "store", part([item])), "--trust", because="holds control characters")


# ---------------------------------------------------------------------- files of holes


@pytest.mark.parametrize("part", [0, *thorough(1, 2)])
@pytest.mark.thorough
def test_files_of_holes_end_no_verb(tmp_path: Path, part: int) -> None:
    home = synthetic_world(tmp_path).path
    places = (home / ".cache", home / ".config", home / ".nv")
    found = sorted(path for place in places for path in place.rglob("*") if path.is_file())
    assert len(found) > 20
    tuned = found[part::3]
    for path in tuned:
        os.truncate(path, 1 << 41)
    for verb in (
        *(("report", "--json"), ("ls", "--json"), ("verify", "--json"), ("doctor", "--json"), ("ls", "--kernel", "*")),
        *(("push", str(tmp_path / "bundle.zip"), "--force"), ("purge", "--all", "--dry-run"), ("purge", "--all")),
        ("purge", "miopen-tuning"),
    ):
        done = cachectl(home, *verb)
        assert done.status in (0, 1), (verb, done)
        assert "Traceback" not in done.stderr
        assert done.peak < 2 * PLAIN, (verb, done)
        if verb[0] == "report":
            layers = {layer["layer"]: layer for layer in json.loads(done.stdout)["layers"]}
            problems = [problem for layer in layers.values() for root in layer["roots"] for problem in root["problems"]]
            for path in tuned:
                if path.suffix == ".txt" and path.parent.name == "miopen":
                    assert any(problem["path"] == str(path) for problem in problems), path
