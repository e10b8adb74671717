"""Sizes that somebody else chose: what is too large is refused in one line, and takes neither memory nor the disk."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiers import thorough

sys.path[:0] = [str(Path(__file__).parents[2] / "faults")]

from worlds import synthetic_world  # noqa: E402

from cachectl.layers.base.limits import LARGEST_MANIFEST  # noqa: E402
from cachectl.layers.formats import zstd  # noqa: E402
from cachectl.layers.stores.archive import tar_header  # noqa: E402
from cachectl.moving.bundle import BadBundle, Item, Manifest, Members, write_bundle, write_manifest  # noqa: E402

if TYPE_CHECKING:
    from homes import Home

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
    {program}
finally:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sys.stderr.write(f"peak {{peak}}\\n")
sys.exit(status)
"""


@dataclass(frozen=True)
class Done:
    """How a program ended: its output, and the most memory it had, in bytes."""

    status: int
    stdout: str
    stderr: str
    peak: int


def measured(program: str, *arguments: str, home: Path, source: int | None = None) -> Done:
    """Run a program in a child. The shell between keeps the size of this process out of the measurement."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", _MEASURED.format(program=program), *arguments],
        stdin=subprocess.DEVNULL if source is None else source,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "RUSTICL_ENABLE": "llvmpipe"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    lines = done.stderr.splitlines()
    assert lines, done
    assert lines[-1].startswith("peak "), done.stderr
    return Done(done.returncode, done.stdout, "\n".join(lines[:-1]), int(lines[-1].split()[1]))


def cachectl(home: Path, *arguments: str, source: int | None = None) -> Done:
    """Run a command."""
    return measured(
        "from cachectl.cli.main import main; status = main(sys.argv[1:])", *arguments, home=home, source=source
    )


# ---------------------------------------------------------------------- bundles


def manifest_alone(path: Path, text: bytes, after: bytes = b"") -> Path:
    """Write a bundle of which there is a manifest, and then something that cannot be compressed."""
    header = tar_header("manifest.json", len(text))
    with path.open("wb") as file:
        with zstd.ZstdFile(file, "wb") as frame:
            frame.write(header + text + bytes(-len(text) % 512))
        file.write(after)
    return path


def items(number: int, details: int) -> bytes:
    """Return a manifest of small entries, near the largest that is read."""
    empty = hashlib.sha256(b"").hexdigest()
    detail = {f"d{place}": "" for place in range(details)}
    every = tuple(Item("pocl", f"{place:07}", "f", 0, empty, detail=detail) for place in range(number))
    text = Manifest(every, {"pocl": {}}).to_bytes()
    assert len(text) <= LARGEST_MANIFEST
    return text


def test_a_manifest_takes_no_more_memory_than_its_bundle_allows(home: Home, tmp_path: Path) -> None:
    nested = b"[[]" + b",[]" * (LARGEST_MANIFEST // 3 - 3) + b"]"
    bomb = manifest_alone(tmp_path / "bomb", nested)
    assert bomb.stat().st_size < 10_000
    done = cachectl(home.path, "import", str(bomb), "--trust")
    assert (done.status, done.stdout) == (1, "")
    assert "a decompression bomb" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.peak < PLAIN


@pytest.mark.parametrize("kind", ["one line", *thorough("many details")])
def test_a_manifest_of_the_largest_size_is_read_in_bounded_memory(home: Home, tmp_path: Path, kind: str) -> None:
    texts = {
        "one line": lambda: b"[[]" + b",[]" * (LARGEST_MANIFEST // 3 - 3) + b"]",
        "many details": lambda: items(60_000, 64),
    }
    # Large enough for such a manifest.
    file = manifest_alone(tmp_path / "bundle", texts[kind](), os.urandom(MIB))
    done = cachectl(home.path, "import", str(file), "--trust")
    assert done.status == 1
    assert done.stderr.startswith("cachectl: cannot use the bundle")
    assert len(done.stderr.splitlines()) == 1
    assert done.peak < 8 * LARGEST_MANIFEST


def large_bundle(path: Path, entries: int) -> Path:
    """Write a bundle of large entries of one layer, each of them zeros but for its number."""
    contents = [bytes([number]) + bytes(LARGE - 1) for number in range(1, entries + 1)]
    every = tuple(
        Item("pocl", f"AB/{number}", "f", len(data), hashlib.sha256(data).hexdigest())
        for number, data in enumerate(contents)
    )
    with path.open("wb") as file:
        write_bundle(file, Manifest(every, {"pocl": {}}), contents)
    return path


READ = """
from cachectl.moving.bundle import Reader, in_batches
with open(sys.argv[1], "rb") as file:
    reader = Reader(file, int(sys.argv[2]))
    if sys.argv[3] == "check":
        reader.check()
    else:
        for batch in in_batches(reader.contents(), lambda pair: pair[0].layer, lambda pair: pair[0].bytes):
            print([len(data) for _, data in batch])
status = 0
""".replace("\n", "\n    ")


@pytest.mark.thorough
def test_large_entries_are_checked_piece_by_piece_and_read_one_at_a_time(tmp_path: Path) -> None:
    file = large_bundle(tmp_path / "bundle", 2)
    checked = measured(READ, str(file), str(LARGE), "check", home=tmp_path)
    assert checked.status == 0
    assert checked.peak < PLAIN
    read = measured(READ, str(file), str(LARGE), "read", home=tmp_path)
    assert (read.status, read.stdout.count(str(LARGE))) == (0, 2)
    assert read.peak < LARGE + PLAIN


def test_an_export_holds_a_large_entry_once_more_than_its_file(home: Home, tmp_path: Path) -> None:
    program = home.path / ".cache" / "pocl" / "kcache" / "AB" / "ABCDEFGHIJKLMNOPABCDEFGHIJKLMNOPABCDE"
    program.mkdir(parents=True)
    (program / "program.spv").touch()
    os.truncate(program / "program.spv", LARGE)
    done = cachectl(home.path, "export", str(tmp_path / "bundle"), "pocl")
    assert done.status == 0
    assert done.peak < 2 * LARGE + PLAIN


ENDLESS = r"""
import sys
sys.stdout.buffer.write(b"\x28\xb5\x2f\xfd")
while True:
    sys.stdout.buffer.write(bytes(1 << 16))
"""


def test_an_endless_source_is_cut_off(home: Home) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as endless:
        assert endless.stdout is not None
        done = cachectl(home.path, "import", "-", "--trust", "--max-size", "8M", source=endless.stdout.fileno())
        endless.kill()
    assert done.status == 1
    assert "has more than 8,388,608 bytes; import --max-size SIZE accepts more" in done.stderr
    assert done.peak < PLAIN


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only the superuser can mount")
def test_the_folder_of_temporary_files_is_not_filled(home: Home, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = (
        'mount -t tmpfs -o size=40m none "$1" || exit 77; (printf "\\050\\265\\057\\375"; cat /dev/zero) |'
        ' TMPDIR="$1" "$2" -m cachectl import - --trust; status=$?; df --output=avail -B1 "$1" | tail -1; exit $status'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(small), sys.executable],
        env={**home.variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip("cannot mount here")
    assert done.returncode == 1
    assert f"{small} has no room for it after 4" in done.stderr
    # The copy has no name, and goes with the process.
    assert int(done.stdout) == 40 * MIB


@pytest.mark.parametrize("character", ["\n", "\x1b", "\x9b", "\u202e"])
def test_keys_with_control_characters_are_refused_before_anything_is_written(
    home: Home, tmp_path: Path, character: str
) -> None:
    data = b"x"
    digest = hashlib.sha256(data).hexdigest()
    # The name of an object file of MIOpen's may hold anything else.
    key = f"{'0' * 32}/kernel{character}.o"
    with (tmp_path / "bundle").open("wb") as file:
        manifest = Manifest((Item("miopen", key, "miopen-object/1", 1, digest),), {"miopen": {}})
        head = write_manifest(file, manifest)
        members = Members(file)
        members.add(data)
        members.finish(head)
    done = cachectl(home.path, "import", str(tmp_path / "bundle"), "--trust")
    assert (done.status, "holds control characters" in done.stderr) == (1, True)
    assert len(done.stderr.splitlines()) == 1
    assert not (home.path / ".cache").exists()


# ---------------------------------------------------------------------- files of holes


def sparse(paths: Sequence[Path]) -> None:
    """Make files two terabytes long, without writing a byte."""
    for path in paths:
        os.truncate(path, 1 << 41)


@pytest.mark.parametrize("part", [0, *thorough(1, 2)])
@pytest.mark.thorough
def test_files_of_holes_end_no_verb(tmp_path: Path, part: int) -> None:
    home = synthetic_world(tmp_path).path
    places = (home / ".cache", home / ".config", home / ".nv")
    found = sorted(path for place in places for path in place.rglob("*") if path.is_file())
    assert len(found) > 20
    sparse(found[part::3])
    tuned = found[part::3]
    for verb in (
        *(("report", "--json"), ("ls", "--json"), ("verify", "--json"), ("doctor", "--json"), ("ls", "--kernel", "*")),
        *(("export", str(tmp_path / "bundle"), "--force"), ("purge", "--all", "--dry-run"), ("purge", "--all")),
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


def test_a_bundle_of_too_large_a_manifest_is_not_written() -> None:
    many = Item("pocl", "k", "f", 0, "0" * 64, detail={"d": "x" * (LARGEST_MANIFEST + 1)})
    with pytest.raises(BadBundle, match="too many for one"):
        write_bundle(io.BytesIO(), Manifest((many,), {"pocl": {}}), [b""])
